"""Predictions for jobs whose model has experts: the job's traced step agrees with the formulas of its layout."""

from __future__ import annotations

from pathlib import Path

import pytest

import shardscope as ss
from conformance.ranks import RankPool
from prediction.ranks_of import EVERY_STEP, hold_compared, hold_states, hold_traffic, run_on
from shardscope.analytic.compute.flops import forward_flops
from shardscope.prediction.traced import traced
from shardscope.spec.models import MODELS, GPTConfig

MIXED = [
    name for name, config in MODELS.items() if isinstance(config, GPTConfig) and config.mixture is not None
]


@pytest.mark.parametrize("name", MIXED)
def test_a_traced_model_has_the_parameters_and_the_flops_of_its_description(name: str) -> None:
    table = traced(ss.Job(model=name, data="python-source", batch=4)).table
    model = ss.Model.of(name)
    assert sum(layer.num_params for layer in table.layers) == model.num_params
    assert sum(layer.flops for layer in table.layers) == forward_flops(model)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("strategy", ["ring", "zero-1", "zero-3"])
@pytest.mark.parametrize("recompute", ["none", "full"])
def test_each_rank_sends_and_holds_what_is_predicted(
    pool: RankPool, tmp_path: Path, strategy: str, recompute: str
) -> None:
    """Without drops, the routed tokens' memory does not depend on which experts they go to."""
    job = ss.Job(
        model="moe-nano", data="python-source", strategy=strategy, world_size=2, steps=2, record=EVERY_STEP,
        batch=ss.Batch(16, micro_batch=4), recompute=recompute, optimizer="lamb", clip_norm=1.0,
    )  # fmt: skip
    trace = traced(job).table.step
    assert trace is not None
    events = run_on(pool, job, tmp_path)
    hold_states(job, trace, events)
    assert hold_traffic(job, trace, events) > 0
    for predicted, measured in hold_compared(job, tmp_path)["memory", "activations"].by_rank:
        assert measured == pytest.approx(predicted, rel=0.01)
