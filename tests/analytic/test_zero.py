from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardscope.analytic import communication as comm
from shardscope.analytic import sharding

SHAPES = st.lists(st.lists(st.integers(1, 50), min_size=1, max_size=3), min_size=1, max_size=6)
RANKS = st.integers(2, 16)
RING = comm.ShardCollectives(4)


def sharded(units: Any, world: int, **settings: Any) -> Any:
    """Bytes by rank, agreement left out."""
    traffic = comm.fully_sharded_traffic(units, world, RING, **settings)
    return comm.sent_bytes({name: sent for name, sent in traffic.items() if name != "agreement"})


@given(st.lists(st.integers(1, 10**6), min_size=1, max_size=8), RANKS)
def test_zero_1_moves_what_the_ring_does(buckets: list[int], world: int) -> None:
    sent = comm.sent_bytes(comm.flat_shards_traffic(buckets, world, RING))
    assert sent.sum() == comm.all_reduce_bytes(4 * sum(buckets), world)


@given(SHAPES, RANKS)
def test_zero_2_is_the_ring_and_zero_3_half_as_much_again_but_for_padding(
    shapes: list[list[int]], world: int
) -> None:
    padded = sum(sharding.padded_elements(shape, world) for shape in shapes)
    second, third = (sharded([shapes], world, gathers=gathers) for gathers in (1, 2))
    assert second.sum() == comm.all_reduce_bytes(4 * padded, world)
    assert (2 * third == 3 * second).all()


@given(SHAPES, RANKS)
def test_row_shards_cover_the_tensors(shapes: list[list[int]], num_shards: int) -> None:
    held = sharding.row_shard_elements(shapes, num_shards)
    assert held.sum() == sum(math.prod(shape) for shape in shapes)
    assert held[0] * num_shards == sum(sharding.padded_elements(shape, num_shards) for shape in shapes)


@pytest.mark.parametrize(
    ("gathers", "micro_batches", "passes"), [(1, 1, 2), (1, 4, 5), (2, 1, 3), (8, 4, 12)]
)
def test_accumulation_repeats_what_it_must(gathers: int, micro_batches: int, passes: int) -> None:
    sent = sharded([[(8, 3)]], 4, gathers=gathers, micro_batches=micro_batches)
    assert sent.tolist() == [passes * 3 * 6 * 4] * 4


def test_replicas_exchange_shards_across() -> None:
    sent = sharded([[(4, 3)]], 4, gathers=2, replicas=2)
    assert sent.tolist() == [3 * 24 + 24] * 4
