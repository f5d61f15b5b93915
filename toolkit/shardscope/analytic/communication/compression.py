"""Compressed gradients in a plan: size, time to pack, and the bandwidth below which compression pays off.

Only linear methods allow compressed gradients to be added: half-precision floats and PowerSGD's factors can be
all-reduced. Integers take two phases: each worker unpacks and sums its share of all gradients, then packs the sum and
sends it to all, so that the volume is that of a packed all-reduce (Tang et al. 2021). Sparse gradients are
all-gathered: each worker sends its part to all others and unpacks W parts. The volume grows with W, so beyond some
number of workers the method is slower at any ratio (Agarwal et al. 2022, "On the utility of gradient compression in
distributed training systems").

`compressed` counts the exact bytes of the methods that run; this module is for plans, over arrays.
"""

from __future__ import annotations

from functools import lru_cache
from math import prod
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from shardscope.analytic.communication._checks import numbers
from shardscope.analytic.communication.collective import collective_time
from shardscope.analytic.communication.exchange import level_rate
from shardscope.analytic.communication.ring import Floats
from shardscope.errors import SpecError
from shardscope.spec.compression import Compression
from shardscope.spec.layout_compression import compression_names, layout_compression

MATRIX_ROWS = 4096
"""Default number of rows of the matrices that low-rank methods factor."""
FEEDBACK_PASSES = 2.0
"""Memory passes of error feedback: the residual is added to the gradient, and the new residual is written back."""
_LONG = 1 << 24
"""Number of elements of a long gradient, chosen so that its packet has no partial block at the end."""


class _Packet(NamedTuple):
    """Packet of a method for a long gradient: bytes per element, and messages."""

    bytes_per_element: float
    messages: float
    """Number of consecutive collectives."""


@lru_cache(maxsize=256)
def _packet(method: Compression, matrix_rows: int) -> _Packet:
    """Derive the packet from an exchange between two ranks, in which each sends the bytes of one packed gradient."""
    shapes = [(matrix_rows, matrix_rows)] if method.carriage == "layers" else [(_LONG,)]
    sent = float(method.bucket_bytes(shapes, 2).max())
    return _Packet(sent / prod(shapes[0]), method.rounds(shapes, 2) / (1 if method.meets == "gather" else 2))


class CompressedCost(NamedTuple):
    """Bytes and time (in seconds) of a compressed all-reduce. Arrays follow NumPy broadcasting."""

    packed_bytes: Floats
    """Bytes of one worker's packed gradient."""
    sent_bytes: Floats
    """Bytes that each worker sends over the ring."""
    wire_s: Floats
    codec_s: Floats

    @property
    def total_s(self) -> Floats:
        """Total time for packing, sending and unpacking, in seconds, without overlap."""
        seconds: Floats = self.wire_s + self.codec_s
        return seconds


def packed_bytes(
    method: Compression | str,
    num_elements: npt.ArrayLike,
    *,
    element_bytes: float = 4,
    matrix_rows: float = MATRIX_ROWS,
) -> Floats:
    """Bytes of one worker's packed gradient; an array of the shape of `num_elements`.

    Low-rank methods send r (rows + columns) float32 values for each matrix: with square matrices of `matrix_rows`,
    2 r / rows per element. A matrix whose factors would be larger is sent uncompressed.

    Args:
        method: A compression method that layouts support, or its name.
        num_elements: Elements of the gradient.
        element_bytes: Bytes of one uncompressed element.
        matrix_rows: Rows, and columns, of the matrices that make up the model.
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

    All numbers may be arrays and follow NumPy broadcasting.

    Args:
        method: A compression method that layouts support, or its name.
        num_elements: Elements of the gradient.
        workers: W, the number of workers.
        bandwidth: Bytes per second of the link, one way.
        latency: Seconds per message.
        codec_bandwidth: Bytes per second that packing and unpacking read and write; near the memory bandwidth for
            device kernels.
        element_bytes: Bytes of one uncompressed element.
        matrix_rows: Rows of the matrices that low-rank methods factor.

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
    """Bytes read and written to pack once and to unpack all received packets; 0 for a single worker.

    In a two-phase exchange, a worker first receives its share of every worker's gradient and packs the sum. It then
    receives the packed sums of all other shares.
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


def break_even_bandwidth(
    method: Compression | str,
    num_elements: npt.ArrayLike,
    workers: npt.ArrayLike,
    *,
    latency: npt.ArrayLike = 0.0,
    codec_bandwidth: npt.ArrayLike,
    element_bytes: float = 4,
    matrix_rows: float = MATRIX_ROWS,
) -> Floats:
    """Bandwidth in bytes per second below which compression saves time; 0 if it never does, infinite if it always does.

    Both times are a constant plus a volume over B, so `exchange.level_rate` gives the bandwidth at which they
    are equal.

    Args:
        method: A compression method that layouts support, other than ``none``, or its name.
        num_elements: Elements of the gradient.
        workers: W, the number of workers.
        latency: Seconds per message.
        codec_bandwidth: Bytes per second that the codec reads and writes.
        element_bytes: Bytes of one uncompressed element.
        matrix_rows: Rows of the matrices that low-rank methods factor.
    """
    packing = layout_compression(method)
    if not packing.is_on:
        raise SpecError(
            f"compression='none' has no break-even; use one of {', '.join(compression_names()[1:])}"
        )
    both = [
        compression_cost(
            each,
            num_elements,
            workers,
            np.inf,
            latency=latency,
            codec_bandwidth=codec_bandwidth,
            element_bytes=element_bytes,
            matrix_rows=matrix_rows,
        )
        for each in ("none", packing)
    ]
    return level_rate(both[0].sent_bytes - both[1].sent_bytes, both[1].total_s - both[0].total_s)
