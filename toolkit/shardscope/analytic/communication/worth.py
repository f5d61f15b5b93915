"""Whether compressing pays on a link: a step's exchange by formula, and the bandwidth at which two ways are level.

An exchange is three numbers, however it is done: the bytes that the busiest rank sends, the messages that have to wait
for one another, and the seconds of packing and unpacking. Buckets of gradients are exchanged one after the other, each
with its own padding and its own messages, and what they take adds up. On a link of bandwidth B and latency a it takes

    T(B) = codec + rounds a + bytes / B

so that two ways are level at B = (bytes - bytes') / (rest' - rest), with the rest of each its codec and latencies
(Agarwal et al. 2022, "On the utility of gradient compression in distributed training systems", eq. 1, of which this is
the form for any method).
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from shardscope.analytic.communication._checks import numbers
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
    compression: Compression,
    buckets: Sequence[Sequence[tuple[int, ...]]],
    world_size: int,
    *,
    codec_s: float = 0.0,
    element_bytes: int = _FLOAT_BYTES,
    directions: int = 1,
) -> Exchange:
    """The exchange of one step's gradients, bucket after bucket, over our ring where they are added up.

    Args:
        compression: The method; ``none`` is the ring.
        buckets: Shapes of the tensors of each bucket.
        world_size: W.
        codec_s: Of packing and unpacking all of them, as measured or calculated.
        element_bytes: Of a gradient as it is.
        directions: Of the ring.
    """
    if world_size == 1:
        return Exchange(0.0, 0, 0.0)
    ring, is_on = 2 * (world_size - 1), compression.is_on
    sent, rounds = np.zeros(world_size, dtype=np.int64), 0
    for shapes in buckets:
        if is_on:
            sent += compression.bucket_bytes(shapes, world_size, directions=directions)
            rounds += compression.rounds(shapes, world_size)
        else:
            elements = sum(prod(shape) for shape in shapes)
            sent += ring_all_reduce_bytes(elements, element_bytes, world_size, directions=directions)
            rounds += ring
    return Exchange(float(sent.max()), rounds, codec_s if is_on else 0.0)


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
    extra = (packed.codec_s + packed.rounds * delay) - (plain.codec_s + plain.rounds * delay)
    return level_rate(plain.sent_bytes - packed.sent_bytes, extra)


def level_rate(saved_bytes: npt.ArrayLike, extra_s: npt.ArrayLike) -> Floats:
    """Bytes a second at which sending less takes as long as what it costs: 0 where nothing is saved, infinite where
    nothing is paid for it.

    Args:
        saved_bytes: Fewer by the compressed way. Broadcasts.
        extra_s: Seconds that it takes more besides sending.
    """
    saved, extra = np.asarray(saved_bytes, dtype=np.float64), np.asarray(extra_s, dtype=np.float64)
    with np.errstate(divide="ignore", invalid="ignore"):
        rate: Floats = np.where(saved <= 0, 0.0, np.where(extra <= 0, np.inf, saved / extra))
    return rate
