"""Compressed gradients in a plan: what they weigh, what packing them takes, and below which bandwidth that pays.

A sum of compressed gradients is compressed only if the method is linear: half-precision floats and PowerSGD's factors
can be all-reduced. Integers go in two phases: each worker unpacks and adds up its share of all gradients and packs it
again for all, so that the volume is the all-reduce's, packed (Tang et al. 2021). What is sparse is gathered: each
worker sends its part to all others and unpacks W of them. Its volume grows with W, and from some number of workers on
it loses whatever its ratio (Agarwal et al. 2022, "On the utility of gradient compression in distributed training
systems").

`compressed` counts the bytes of the methods that really run to the last one; this is for plans, over arrays.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from shardscope.analytic.communication._checks import numbers
from shardscope.analytic.communication.collective import collective_time
from shardscope.analytic.communication.compressed import blocks_bytes, placed_bytes
from shardscope.analytic.communication.ring import Floats
from shardscope.analytic.communication.worth import level_rate
from shardscope.errors import SpecError, unknown_name
from shardscope.spec.layout import COMPRESSION_NAMES

MATRIX_ROWS = 4096
"""Rows of the matrices that PowerSGD is taken to factor, unless told otherwise."""


class Method(NamedTuple):
    """A way to compress."""

    bytes_per_element: float
    """Packed, before what depends on the shape."""
    exchange: Literal["sum", "two-phase", "gather"]
    """Whether packed gradients are added up, packed again in between, or all received by all."""
    passes: float
    """Reads and writes of the whole gradient, besides its packed form, that packing takes.

    One to find the scale and one to convert; for the largest 1 % four of a radix selection and two of what is left
    over; for PowerSGD two products and two of what is left over.
    """
    source: str


_LONG = 1 << 24
"""Elements of a gradient whose packet ends in no odd block."""


METHODS: dict[str, Method] = {
    "none": Method(0.0, "sum", 0.0, ""),
    "fp16": Method(2.0, "sum", 1.0, "half precision"),
    "int8": Method(
        blocks_bytes(_LONG, 256, 8) / _LONG,
        "two-phase",
        2.0,
        "Dettmers et al. 2022, a scale a block",
    ),
    "int4": Method(
        blocks_bytes(_LONG, 256, 4) / _LONG,
        "two-phase",
        2.0,
        "Dettmers et al. 2022, a scale a block",
    ),
    "topk-1%": Method(
        placed_bytes(_LONG, 0.01) / _LONG,
        "gather",
        6.0,
        "Lin et al. 2018 (Deep Gradient Compression): float32 values, and their places at 8.6 bits each",
    ),
    "powersgd-4": Method(0.0, "sum", 4.0, "Vogels et al. 2019 (PowerSGD), algorithm 1, rank 4"),
}
assert tuple(METHODS) == COMPRESSION_NAMES
_RANK = 4


class CompressedCost(NamedTuple):
    """What a compressed all-reduce takes; arrays that broadcast."""

    packed_bytes: Floats
    """Of one worker's gradient."""
    sent_bytes: Floats
    """By each worker, over the ring."""
    wire_s: Floats
    codec_s: Floats

    @property
    def total_s(self) -> Floats:
        """Packing, sending and unpacking, one after the other."""
        seconds: Floats = self.wire_s + self.codec_s
        return seconds


def packed_bytes(
    method: str, num_elements: npt.ArrayLike, *, element_bytes: float = 4, matrix_rows: float = MATRIX_ROWS
) -> Floats:
    """Bytes of one worker's packed gradient. Broadcasts over `num_elements`.

    PowerSGD sends r (rows + columns) float32 for each matrix: with square ones of `matrix_rows`, 2 r / rows an element.

    Args:
        method: A name in `METHODS`.
        num_elements: Of the gradient.
        element_bytes: Of one element uncompressed.
        matrix_rows: Rows, and columns, of the matrices that make up the model.
    """
    if method not in METHODS:
        raise unknown_name("compression", method, METHODS)
    count = numbers("num_elements", num_elements, least=0, unit="")
    if method == "none":
        return count * element_bytes
    if method == "powersgd-4":
        rows = numbers("matrix_rows", matrix_rows, least=1, unit="")
        return count * np.minimum(4.0 * 2 * _RANK / rows, element_bytes)
    return count * METHODS[method].bytes_per_element


def compression_cost(
    method: str,
    num_elements: npt.ArrayLike,
    workers: npt.ArrayLike,
    bandwidth: npt.ArrayLike,
    *,
    latency: npt.ArrayLike = 0.0,
    codec_bandwidth: npt.ArrayLike = np.inf,
    element_bytes: float = 4,
    matrix_rows: float = MATRIX_ROWS,
) -> CompressedCost:
    """Bytes and seconds of an all-reduce of compressed gradients over a ring. All numbers broadcast.

    Args:
        method: A name in `METHODS`.
        num_elements: Of the gradient.
        workers: W.
        bandwidth: Of the link: bytes a second, one way.
        latency: Seconds a message.
        codec_bandwidth: Bytes a second that the codec reads and writes; near the memory's for kernels on a device.
        element_bytes: Of one element uncompressed.
        matrix_rows: Of the matrices that PowerSGD factors.

    Raises:
        SpecError: The method is not known, or a number is out of range.
    """
    packed = packed_bytes(method, num_elements, element_bytes=element_bytes, matrix_rows=matrix_rows)
    codec = numbers("codec_bandwidth", codec_bandwidth, least=0, unit="bytes/s", is_open=True)
    count = numbers("workers", workers, least=1, unit="", is_whole=True)
    is_gathered = METHODS[method].exchange == "gather"
    op, size = ("all_gather", packed * count) if is_gathered else ("all_reduce", packed)
    rounds = 2.0 if method == "powersgd-4" else 1.0  # the second factor needs the sum of the first
    wire = collective_time(
        op=op, algorithm="ring", num_bytes=size / rounds, workers=count, bandwidth=bandwidth, latency=latency
    )
    sent = (1.0 if is_gathered else 2.0) * size * (count - 1) / count
    whole = np.asarray(num_elements, dtype=np.float64) * element_bytes
    return CompressedCost(packed, sent, rounds * wire, _codec_bytes(method, whole, packed, count) / codec)


def _codec_bytes(method: str, whole: Floats, packed: Floats, workers: Floats) -> Floats:
    """Bytes read and written to pack once and to unpack what arrives: nothing where there is nobody to send to.

    In two phases, what arrives is a share of everyone's, which is packed once more, and then everyone's share.
    """
    if method == "none":
        return np.zeros(np.broadcast_shapes(whole.shape, workers.shape))
    packing = METHODS[method].passes * whole + packed
    match METHODS[method].exchange:
        case "sum":
            touched: Floats = packing + packed + whole
        case "gather":
            touched = packing + packed * workers + whole
        case "two-phase":
            touched = packing * (1.0 + 1.0 / workers) + 2.0 * (packed + whole)
    return np.where(workers > 1, touched, 0.0)


def compressed_all_reduce_time(
    compression: npt.ArrayLike,
    num_elements: npt.ArrayLike,
    workers: npt.ArrayLike,
    bandwidth: npt.ArrayLike,
    *,
    latency: npt.ArrayLike = 0.0,
    codec_bandwidth: npt.ArrayLike = np.inf,
    element_bytes: float = 4,
) -> Floats:
    """Seconds of `compression_cost` for a whole table: `compression` holds indices into `COMPRESSION_NAMES`."""
    index = np.asarray(compression)
    arrays = (num_elements, workers, bandwidth, latency, codec_bandwidth)
    shape = np.broadcast_shapes(index.shape, *(np.shape(value) for value in arrays))
    index = np.broadcast_to(index, shape)
    seconds = np.zeros(shape)
    for which in np.unique(index):
        rows = index == which
        count, group, rate, delay, codec = (np.broadcast_to(value, shape)[rows] for value in arrays)
        cost = compression_cost(
            COMPRESSION_NAMES[which],
            count,
            group,
            rate,
            latency=delay,
            codec_bandwidth=codec,
            element_bytes=element_bytes,
        )
        seconds[rows] = cost.total_s
    return seconds


def break_even_bandwidth(
    method: str,
    num_elements: npt.ArrayLike,
    workers: npt.ArrayLike,
    *,
    latency: npt.ArrayLike = 0.0,
    codec_bandwidth: npt.ArrayLike,
    element_bytes: float = 4,
    matrix_rows: float = MATRIX_ROWS,
) -> Floats:
    """Bandwidth in bytes a second below which compressing pays: 0 where none is low enough, infinite where any is.

    Both times are a constant plus a volume over B, so that they are level where `worth.level_rate` says.

    Args:
        method: A name in `METHODS`, other than ``"none"``.
        num_elements: Of the gradient.
        workers: W.
        latency: Seconds a message.
        codec_bandwidth: Bytes a second that the codec reads and writes.
        element_bytes: Of one element uncompressed.
        matrix_rows: Of the matrices that PowerSGD factors.
    """
    if method == "none":
        raise SpecError(
            f"compression='none' has no break-even; take one of {', '.join(COMPRESSION_NAMES[1:])}"
        )
    both = [
        compression_cost(
            name,
            num_elements,
            workers,
            np.inf,
            latency=latency,
            codec_bandwidth=codec_bandwidth,
            element_bytes=element_bytes,
            matrix_rows=matrix_rows,
        )
        for name in ("none", method)
    ]
    return level_rate(both[0].sent_bytes - both[1].sent_bytes, both[1].total_s - both[0].total_s)
