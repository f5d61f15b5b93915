"""Whether compressing pays on a link: a step's exchange by formula, and the bandwidth at which two ways are level.

An exchange is three numbers, however it is done: the bytes that the busiest rank sends, the messages that have to wait
for one another, and the seconds of packing and unpacking. On a link of bandwidth B and latency a it takes

    T(B) = codec + rounds a + bytes / B

so that two ways are level at B = (bytes - bytes') / (rest' - rest), with the rest of each its codec and latencies
(Agarwal et al. 2022, "On the utility of gradient compression in distributed training systems", eq. 1, of which this is
the form for any method).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from shardscope.analytic.communication._checks import numbers
from shardscope.analytic.communication.compressed import SUMMED, compressed_bytes
from shardscope.analytic.communication.ring import Floats, ring_all_reduce_bytes
from shardscope.spec.compression import Compression

_FLOAT_BYTES = 4


class Exchange(NamedTuple):
    """What it takes that all ranks end with the mean of one step's gradients."""

    sent_bytes: float
    """By the rank that sends most."""
    rounds: int
    """Messages that wait for one another."""
    codec_s: float = 0.0
    """Seconds of packing and unpacking on one rank."""


def exchange_of(
    compression: Compression, shapes: Sequence[tuple[int, ...]], world_size: int, *, codec_s: float = 0.0
) -> Exchange:
    """The exchange of one step's gradients, taken as one bucket, over our ring where they are added up.

    Args:
        compression: The method; ``none`` is the ring.
        shapes: Of the model's tensors.
        world_size: W.
        codec_s: Of packing and unpacking, as measured or calculated.
    """
    if world_size == 1:
        return Exchange(0.0, 0, 0.0)
    ring = 2 * (world_size - 1)
    if not compression.is_on:
        elements = sum(int(np.prod(shape)) for shape in shapes)
        return Exchange(float(ring_all_reduce_bytes(elements, _FLOAT_BYTES, world_size).max()), ring)
    sent = float(compressed_bytes(compression, shapes, world_size).max())
    return Exchange(sent, _rounds(compression, ring), codec_s)


def _rounds(compression: Compression, ring: int) -> int:
    if compression.name in SUMMED:
        return ring
    if compression.name in {"powersgd", "adaptive-rank"}:
        return 2 * ring  # the second factor needs the sum of the first
    return 1 if compression.settings.get("exchange") == "gather" else 2


def exchange_time(exchange: Exchange, bandwidth: npt.ArrayLike, latency: npt.ArrayLike = 0.0) -> Floats:
    """Seconds on a link. Broadcasts.

    Args:
        exchange: What is exchanged.
        bandwidth: Bytes a second, one way, of each rank's link.
        latency: Seconds a message.

    Raises:
        SpecError: A number is out of range.
    """
    rate = numbers("bandwidth", bandwidth, least=0, unit="bytes/s", is_open=True)
    delay = numbers("latency", latency, least=0, unit="s")
    seconds: Floats = exchange.codec_s + exchange.rounds * delay + exchange.sent_bytes / rate
    return seconds


def level_bandwidth(plain: Exchange, packed: Exchange, latency: npt.ArrayLike = 0.0) -> Floats:
    """The bandwidth in bytes a second below which `packed` is quicker: 0 where none is low enough, infinite where any.

    Args:
        plain: The exchange as it is.
        packed: The exchange compressed.
        latency: Seconds a message. Broadcasts.
    """
    delay = numbers("latency", latency, least=0, unit="s")
    saved = plain.sent_bytes - packed.sent_bytes
    extra = (packed.codec_s + packed.rounds * delay) - (plain.codec_s + plain.rounds * delay)
    with np.errstate(divide="ignore", invalid="ignore"):
        rate: Floats = np.where(saved <= 0, 0.0, np.where(extra <= 0, np.inf, saved / extra))
    return rate
