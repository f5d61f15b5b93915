"""How ZeRO-1 fills its buckets, by formula, against the cutting that training does."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from shardscope.analytic.sharding import bucket_elements
from shardscope.training.strategies._flat import cut_into_buckets


@given(sizes=st.lists(st.integers(0, 50), min_size=1, max_size=12), num_bytes=st.integers(1, 300))
def test_buckets_are_those_that_training_cuts(sizes: list[int], num_bytes: int) -> None:
    named = [(str(i), nn.Parameter(torch.zeros(size))) for i, size in enumerate(sizes)]
    cut = [sum(p.numel() for _, p in bucket) for bucket in cut_into_buckets(named, num_bytes)]
    assert bucket_elements(sizes, num_bytes // 4) == cut
