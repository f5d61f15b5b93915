"""Bytes, messages and time of exchanging gradients, compressed and not."""

from __future__ import annotations

import numpy as np
import pytest

import shardscope as ss
from shardscope.analytic.communication.exchange import (
    ExchangeCost,
    exchange_of,
    exchange_time,
)


def test_gathered_integers_among_eight_weigh_what_the_ring_sends() -> None:
    shapes = [[(1024, 1024)]]
    plain = exchange_of(ss.Compression("none"), shapes, 8)
    gathered = exchange_of(ss.Compression("int8", exchange="gather"), shapes, 8)
    assert gathered.sent_bytes / plain.sent_bytes == pytest.approx(1 + 4 / 256, rel=0.01)


def test_buckets_are_padded_and_wait_for_one_another_each_by_itself() -> None:
    """By hand, among three: blocks of 256 share a scale of 4 bytes, and a share is of whole blocks."""
    buckets = [[(100,)], [(256, 4), (7,)]]
    packed = exchange_of(ss.Compression("int8"), buckets, 3)
    shares = [256, 2 * 256]
    assert packed.sent_bytes == sum(2 * 2 * (share + 4 * share // 256) for share in shares)
    assert packed.rounds == 4
    plain = exchange_of(ss.Compression("none"), buckets, 3)
    assert plain.rounds == 8
    whole = exchange_of(ss.Compression("none"), [[*buckets[0], *buckets[1]]], 3)
    assert plain.sent_bytes == pytest.approx(whole.sent_bytes, abs=8)
    assert whole.rounds == 4


def test_a_bucket_without_matrices_takes_low_rank_methods_one_message() -> None:
    low_rank = ss.Compression("powersgd", rank=2)
    assert exchange_of(low_rank, [[(64, 64), (64,)]], 4).rounds == 12
    assert exchange_of(low_rank, [[(64, 64)], [(64,), (3, 2)]], 4).rounds == 18


def test_one_worker_exchanges_nothing() -> None:
    assert exchange_of(ss.Compression("int8"), [[(10,)]], 1) == ExchangeCost(0.0, 0, 0.0)


def test_bandwidths_broadcast_and_must_be_above_zero() -> None:
    exchange = ExchangeCost(1e6, 2, 0.1)
    assert exchange_time(exchange, np.array([1e6, 1e7]), 0.5) == pytest.approx([2.1, 1.2])
    with pytest.raises(ss.SpecError, match="bandwidth=0"):
        exchange_time(exchange, 0)
