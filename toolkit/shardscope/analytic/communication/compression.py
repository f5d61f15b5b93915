"""Cost of compressed gradients, as arrays for searches: bytes and codec time.

Half-precision floats and PowerSGD's factors can be added in compressed form, and are therefore all-reduced.
Quantized integers are exchanged in two phases: each worker unpacks and sums its share of all gradients, then
packs the sum and sends it to all workers. The volume is the same as for an all-reduce of packed gradients
(Tang et al. 2021). Sparse gradients are all-gathered: each worker sends its packet to all others and unpacks
the packets of all W workers. Their volume grows with W, so above some number of workers, sparse gradients are
slower at any compression ratio (Agarwal et al. 2022, "On the utility of gradient compression in distributed
training systems").

Exact bytes for runs are in the module `compressed`.
"""

from __future__ import annotations

from functools import lru_cache
from math import prod
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from shardscope.analytic.communication._checks import numbers
from shardscope.analytic.communication.collective import collective_time
from shardscope.analytic.communication.ring import Floats
from shardscope.spec.compression import Compression, layout_compression

MATRIX_ROWS = 4096
"""Default number of rows in the square matrices that low-rank methods factorize."""
FEEDBACK_PASSES = 2.0
"""Passes over the gradient's memory for error feedback: add the residual, and write the new residual."""
_LONG = 1 << 24
"""Elements in the example gradient from which bytes per element are computed; a multiple of every block size."""


class _Packet(NamedTuple):
    """Size of a method's packed gradient per element, and number of collectives that exchange it."""

    bytes_per_element: float
    messages: float
    """Number of consecutive collectives."""


@lru_cache(maxsize=256)
def _packet(method: Compression, matrix_rows: int) -> _Packet:
    """Return the packet of a method, computed for two ranks, each of which sends exactly one packed gradient."""
    shapes = [(matrix_rows, matrix_rows)] if method.carriage == "layers" else [(_LONG,)]
    sent = float(method.bucket_bytes(shapes, 2).max())
    return _Packet(sent / prod(shapes[0]), method.rounds(shapes, 2) / (1 if method.meets == "gather" else 2))


class CompressedCost(NamedTuple):
    """Bytes and time of an all-reduce of compressed gradients, as arrays that can be broadcast against each other."""

    packed_bytes: Floats
    """Bytes of one worker's packed gradient."""
    sent_bytes: Floats
    """Bytes that each worker sends over the ring."""
    wire_s: Floats
    """Time for sending, in seconds."""
    codec_s: Floats
    """Time for packing and unpacking, in seconds."""

    @property
    def total_s(self) -> Floats:
        """Time for packing, sending and unpacking in sequence, in seconds."""
        seconds: Floats = self.wire_s + self.codec_s
        return seconds


def packed_bytes(
    method: Compression | str,
    num_elements: npt.ArrayLike,
    *,
    element_bytes: float = 4,
    matrix_rows: float = MATRIX_ROWS,
) -> Floats:
    """Return the bytes of one worker's packed gradient, as an array of the shape of `num_elements`.

    Low-rank methods of rank r send r (rows + columns) float32 values for each matrix. The model is assumed to consist
    of square matrices with `matrix_rows` rows; if the two factors are not smaller than the matrix, it is sent
    uncompressed.

    Args:
        method: A compression method that layouts support, or its name.
        num_elements: Number of elements in the gradient.
        element_bytes: Bytes of one uncompressed element.
        matrix_rows: Number of rows, and of columns, in the model's matrices.
    """
    packing = layout_compression(method)
    count = numbers("num_elements", num_elements, least=0, unit="")
    rows = numbers("matrix_rows", matrix_rows, least=1, unit="", is_whole=True)
    if not packing.is_on:
        return count * element_bytes
    each = _packet(packing, int(rows)).bytes_per_element
    return count * (min(each, element_bytes) if packing.carriage == "layers" else each)


def compression_cost(
    method: Compression | str,
    num_elements: npt.ArrayLike,
    workers: npt.ArrayLike,
    bandwidth: npt.ArrayLike,
    *,
    latency: npt.ArrayLike = 0.0,
    codec_bandwidth: npt.ArrayLike = np.inf,
    element_bytes: float = 4,
    matrix_rows: float = MATRIX_ROWS,
) -> CompressedCost:
    """Return the bytes and the time of an all-reduce of compressed gradients over a ring.

    All numbers may be arrays, which are broadcast against each other.

    Args:
        method: A compression method that layouts support, or its name.
        num_elements: Number of elements in the gradient.
        workers: W, the number of workers.
        bandwidth: Bytes per second of the link, in one direction.
        latency: Seconds per message.
        codec_bandwidth: Bytes per second that packing and unpacking read and write; for GPU kernels, close to the
            memory bandwidth.
        element_bytes: Bytes of one uncompressed element.
        matrix_rows: Number of rows in the matrices that low-rank methods factorize.

    Raises:
        SpecError: The method is unknown, or a number is out of range.
    """
    packing = layout_compression(method)
    packed = packed_bytes(packing, num_elements, element_bytes=element_bytes, matrix_rows=matrix_rows)
    codec = numbers("codec_bandwidth", codec_bandwidth, least=0, unit="bytes/s", is_open=True)
    count = numbers("workers", workers, least=1, unit="", is_whole=True)
    is_gathered = packing.meets == "gather"
    op, size = ("all_gather", packed * count) if is_gathered else ("all_reduce", packed)
    messages = _packet(packing, int(matrix_rows)).messages
    wire = collective_time(
        op=op,
        algorithm="ring",
        num_bytes=size / messages,
        workers=count,
        bandwidth=bandwidth,
        latency=latency,
    )
    sent = (1.0 if is_gathered else 2.0) * size * (count - 1) / count
    whole = np.asarray(num_elements, dtype=np.float64) * element_bytes
    return CompressedCost(packed, sent, messages * wire, _codec_bytes(packing, whole, packed, count) / codec)


def _codec_bytes(method: Compression, whole: Floats, packed: Floats, workers: Floats) -> Floats:
    """Return the bytes that one worker reads and writes to pack its gradient and unpack all received packets.

    In a two-phase exchange, a worker first unpacks its share of every worker's gradient and packs the sum of these. It
    then unpacks the summed shares of all workers. A single worker packs nothing.
    """
    if not method.is_on:
        return np.zeros(np.broadcast_shapes(whole.shape, workers.shape))
    assert method.codec_passes is not None
    packing = (method.codec_passes + FEEDBACK_PASSES * method.remembers) * whole + packed
    match method.meets:
        case "sum":
            touched: Floats = packing + packed + whole
        case "gather":
            touched = packing + packed * workers + whole
        case "two-phase":
            touched = packing * (1.0 + 1.0 / workers) + 2.0 * (packed + whole)
    return np.where(workers > 1, touched, 0.0)
