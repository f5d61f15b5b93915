"""How buckets are filled, by formula: ZeRO-1's against the cutting that training does, replicas' against torch's."""

from __future__ import annotations

import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from shardscope.analytic.sharding import (
    bucket_elements,
    flat_piece_elements,
    flat_shard_elements,
    replica_buckets,
)
from shardscope.methods.strategies.zero_1._torch_flat import cut_into_buckets


@given(sizes=st.lists(st.integers(0, 50), min_size=1, max_size=12), num_bytes=st.integers(1, 300))
def test_buckets_are_those_that_training_cuts(sizes: list[int], num_bytes: int) -> None:
    named = [(str(i), nn.Parameter(torch.zeros(size))) for i, size in enumerate(sizes)]
    cut = [sum(p.numel() for _, p in bucket) for bucket in cut_into_buckets(named, num_bytes)]
    assert bucket_elements(sizes, num_bytes // 4) == cut


@given(
    shapes=st.lists(st.tuples(st.integers(1, 6), st.integers(1, 9)), min_size=1, max_size=12),
    num_bytes=st.integers(1, 600), wide=st.booleans(),
)  # fmt: skip
def test_replicas_buckets_are_those_that_torchs_reducer_cuts(
    shapes: list[tuple[int, ...]], num_bytes: int, wide: bool
) -> None:
    come = [torch.zeros(shape, dtype=torch.float64 if wide else torch.float32) for shape in reversed(shapes)]
    cut = dist._compute_bucket_assignment_by_size(come, [num_bytes], [False] * len(come))[0]
    expected = [[tuple(come[index].shape) for index in bucket] for bucket in cut]
    assert replica_buckets(shapes[::-1], num_bytes / 2**20, element_bytes=8 if wide else 4) == expected


@given(
    sizes=st.lists(st.integers(0, 200), min_size=1, max_size=12),
    capacity=st.integers(1, 300),
    world_size=st.integers(1, 7),
    is_padded=st.booleans(),
)
def test_pieces_of_flat_buckets_add_up_to_tensors_and_to_shards(
    sizes: list[int], capacity: int, world_size: int, *, is_padded: bool
) -> None:
    pieces = flat_piece_elements(sizes, capacity, world_size, is_padded=is_padded)
    shards = flat_shard_elements(bucket_elements(sizes, capacity), world_size, is_padded=is_padded)
    assert pieces.sum(axis=1).tolist() == sizes
    assert pieces.sum(axis=0).tolist() == shards.tolist()
