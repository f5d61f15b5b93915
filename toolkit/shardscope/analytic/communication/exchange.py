"""Cost of exchanging one step's gradients, compressed or not.

An exchange is described by three numbers: the bytes that the busiest rank sends, the number of consecutive messages
(rounds), and the seconds of packing and unpacking (codec). Buckets of gradients are exchanged in sequence, so
the costs of buckets add up. On a link of bandwidth B and latency α, an exchange takes

    T(B) = codec + rounds α + bytes / B
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


class ExchangeCost(NamedTuple):
    """Cost of averaging one step's gradients over all ranks."""

    sent_bytes: float
    """Bytes sent by the rank that sends the most."""
    rounds: int
    """Number of consecutive messages."""
    codec_s: float = 0.0
    """Time for packing and unpacking on one rank, in seconds."""


def exchange_of(
    compression: Compression,
    buckets: Sequence[Sequence[tuple[int, ...]]],
    world_size: int,
    *,
    codec_s: float = 0.0,
    element_bytes: int = _FLOAT_BYTES,
    directions: int = 1,
) -> ExchangeCost:
    """Return the cost of exchanging one step's gradients, bucket by bucket. All-reduces use Shardscope's ring.

    Args:
        compression: The compression method; ``none`` for an uncompressed all-reduce.
        buckets: Shapes of the tensors in each bucket.
        world_size: W, the number of ranks.
        codec_s: Time for packing and unpacking all buckets, in seconds, measured or computed.
        element_bytes: Bytes of one uncompressed gradient element.
        directions: Number of directions in which the ring sends, 1 or 2.
    """
    if world_size == 1:
        return ExchangeCost(0.0, 0, 0.0)
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
    return ExchangeCost(float(sent.max()), rounds, codec_s if is_on else 0.0)


def exchange_time(exchange: ExchangeCost, bandwidth: npt.ArrayLike, latency: npt.ArrayLike = 0.0) -> Floats:
    """Return the time of one exchange on a link, in seconds. Bandwidth and latency may be arrays.

    Args:
        exchange: The exchange.
        bandwidth: Bytes per second of each rank's link, in one direction.
        latency: Seconds per message.

    Raises:
        SpecError: A number is out of range.
    """
    rate = numbers("bandwidth", bandwidth, least=0, unit="bytes/s", is_open=True)
    delay = numbers("latency", latency, least=0, unit="s")
    seconds: Floats = exchange.codec_s + exchange.rounds * delay + exchange.sent_bytes / rate
    return seconds
