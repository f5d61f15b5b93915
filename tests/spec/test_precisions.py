"""Micro-batches of a step, and the names of precisions in jobs, layouts and studies."""

from __future__ import annotations

import pytest

import shardscope as ss
from shardscope.analytic.memory.states import RECIPES, model_state_bytes, model_states
from shardscope.spec.space import Space
from shardscope.tuning.apply import apply
from shardscope.tuning.definition import Definition

JOB = ss.Job(
    model="mlp", data="digits", strategy="ring", world_size=4,
    lr_schedule=ss.LRSchedule("cosine", warmup_steps=2), batch=ss.Batch(128, micro_batch=8),
)  # fmt: skip


@pytest.mark.parametrize(
    ("strategy", "world_size", "batch", "count"),
    [
        ("ring", 4, 128, 1),
        ("ring", 4, ss.Batch(128, micro_batch=8), 4),
        ("pipeline", 4, ss.Batch(128, micro_batch=8), 16),
        (ss.ParameterServer(dedicated=True), 3, ss.Batch(64, micro_batch=8), 4),
    ],
)
def test_a_job_counts_the_micro_batches_of_a_step(strategy, world_size: int, batch, count: int) -> None:
    job = ss.Job(model="mlp", data="digits", strategy=strategy, world_size=world_size, batch=batch)
    assert job.num_micro_batches == count


@pytest.mark.parametrize(("alias", "full"), [("bf16", "bf16-mixed"), ("fp16", "fp16-mixed")])
def test_short_names_of_mixed_precisions_are_aliases_in_jobs_and_layouts(alias: str, full: str) -> None:
    assert ss.Job(model="mlp", data="digits", precision=alias).precision == full
    assert JOB.replace(precision=alias) == JOB.replace(precision=full)
    assert ss.Layout(precision=alias) == ss.Layout(precision=full)
    assert model_state_bytes(1, precision=alias) == model_state_bytes(1, precision=full) == 16


def test_autocast_keeps_whole_weights_under_a_name_of_its_own() -> None:
    """Jobs of a mixed precision hold what the layouts of ``-autocast`` count, which also have the product's copies."""
    assert ss.Layout(precision="bf16-autocast").precision == "bf16-autocast"
    whole = model_states(1, precision="fp32")
    for name in ("bf16-autocast", "fp16-autocast"):
        assert model_states(1, precision=name) == whole
        assert RECIPES[name].copies == 2
    with pytest.raises(ss.SpecError, match="did you mean 'bf16-mixed'"):
        ss.Job(model="mlp", data="digits", precision="bf16-autocast")


def test_a_study_over_the_short_names_trains_what_they_stand_for() -> None:
    space = Space({"precision": ["fp32", "bf16"]})
    assert apply(JOB, {"precision": "bf16"}).precision == "bf16-mixed"
    assert Definition(job=JOB, space=space, objectives=("loss",)).space == space
