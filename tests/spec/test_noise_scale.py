"""Which jobs may measure their gradient noise scale."""

from __future__ import annotations

import pytest

import shardscope as ss
from shardscope.errors import SpecError

ON = ss.Record(noise_scale=True)


def job(**changes):
    return ss.Job(**{"model": "mlp", "data": "digits", "world_size": 2, "record": ON, **changes})


@pytest.mark.parametrize(
    "strategy", ["all-reduce", "ring", "tree", "hierarchical", "zero-1", "zero-2", "zero-3"]
)
def test_collectives_can(strategy):
    assert ss.Job.from_json(job(strategy=strategy).to_json()).record.noise_scale


@pytest.mark.parametrize("strategy", ["gossip", "parameter-server", "pipeline:1f1b", "zero-2:backend"])
def test_others_say_who_can(strategy):
    with pytest.raises(
        SpecError, match=rf"strategy='{strategy}', where .*; use one of single, all-reduce, .*zero-3"
    ):
        job(strategy=strategy)


def test_parameters_that_differ_have_no_common_gradient():
    with pytest.raises(SpecError, match="local-sgd"):
        job(compression="local-sgd")


def test_one_rank_needs_micro_batches():
    with pytest.raises(
        SpecError, match="micro_batch=64 has only one; use a micro_batch below 64, or more ranks"
    ):
        job(strategy="single", world_size=1)
    with pytest.raises(SpecError, match="use a larger batch"):
        job(strategy="single", world_size=1, batch=1)
    assert job(strategy="single", world_size=1, batch=ss.Batch(64, micro_batch=32)).record.noise_scale


def test_it_is_off_by_default_and_can_be_rare():
    assert not any(ss.Record().measures_noise(step) for step in range(1, 20))
    rare = ss.Record(noise_scale=True, noise_every=5)
    assert [step for step in range(1, 12) if rare.measures_noise(step)] == [5, 10]
    with pytest.raises(SpecError, match="noise_every=5 has no effect without noise_scale=True"):
        ss.Record(noise_every=5)
