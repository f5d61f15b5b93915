"""The laws of the order of the data."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from shardscope.errors import DataError
from shardscope.training.data import GlobalSampler, shard

samplers = st.integers(1, 200).flatmap(
    lambda rows: st.builds(GlobalSampler, st.just(rows), st.integers(1, rows), seed=st.integers(0, 2**63))
)


@given(sampler=samplers, epoch=st.integers(0, 5))
def test_an_epoch_visits_no_row_twice_and_leaves_out_less_than_a_batch(sampler, epoch):
    first = epoch * sampler.steps_per_epoch
    steps = range(first, first + sampler.steps_per_epoch)
    seen = torch.cat([sampler.indices(step) for step in steps]).tolist()
    assert len(set(seen)) == len(seen)
    assert set(seen) <= set(range(sampler.num_samples))
    assert sampler.num_samples - len(seen) < sampler.global_batch


@given(rows=st.integers(1, 100), batches=st.integers(1, 10))
def test_an_epoch_of_whole_batches_visits_every_row_once(rows, batches):
    sampler = GlobalSampler(rows * batches, rows, seed=1)
    seen = torch.cat([sampler.indices(step) for step in range(batches)])
    assert sorted(seen.tolist()) == list(range(rows * batches))


@given(sampler=samplers, step=st.integers(0, 10**6))
def test_any_step_can_be_asked_for_at_once(sampler, step):
    fresh = GlobalSampler(sampler.num_samples, sampler.global_batch, sampler.seed)
    sampler.indices(0)
    assert torch.equal(sampler.indices(step), fresh.indices(step))
    assert fresh.indices(step).dtype == torch.int64


@given(sampler=samplers, world_size=st.integers(1, 16), step=st.integers(0, 50))
def test_the_ranks_together_read_the_global_batch(sampler, world_size, step):
    batch = sampler.indices(step)
    parts = [shard(batch, rank, world_size) for rank in range(world_size)]
    assert torch.equal(torch.cat(parts), batch)
    sizes = {len(part) for part in parts}
    assert max(sizes) - min(sizes) <= (sampler.global_batch % world_size > 0)


def test_each_epoch_and_each_seed_has_its_own_order():
    orders = [GlobalSampler(100, 100, seed).indices(epoch) for seed in (0, 1, 2**32) for epoch in (0, 1)]
    assert len({tuple(order.tolist()) for order in orders}) == len(orders)


@pytest.mark.parametrize("size", [0, 11])
def test_a_batch_that_does_not_fit_is_refused(size):
    with pytest.raises(
        DataError, match=f"global_batch={size} is out of range for data with 10 rows; use a size from 1 to 10"
    ):
        GlobalSampler(10, size, seed=0)
