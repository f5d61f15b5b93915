"""What ranks with different experts send and hold in the stages of a pipeline, and with parts of sequences."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from torch import nn

import shardscope as ss
from conformance.ranks import RankPool
from prediction.ranks_of import hold_compared, hold_states, hold_traffic, run_on
from prediction.test_expert_axis import A2A, RING, even, job_of, mesh, routed, sent
from shardscope.analytic.job_step import JobStep
from shardscope.errors import SpecError
from shardscope.prediction.traced import traced

ZERO_1 = ss.Zero1(bucket_mb=0.02)


def late() -> nn.Module:
    """The first stage has no layer with experts."""
    return even(dense_layers=1)


def staged(data: Any = RING, schedule: str = "1f1b", **settings: Any) -> ss.Strategy:
    stages = ss.Pipeline(schedule=schedule, split="even")
    return mesh(data, **{"pipeline": 2, "stages": stages, **settings})


STAGED: list[tuple[ss.Strategy, dict[str, Any]]] = [
    (staged(ZERO_1, "gpipe"), {"model": late, "optimizer": "lamb", "clip_norm": 1.0}),
    (staged(RING), {"model": late, "optimizer": "lamb", "clip_norm": 1.0}),
    (staged("zero-3"), {"optimizer": "lamb", "clip_norm": 1.0}),
    (staged(RING, "zb-h1"), {"recompute": "selective"}),
    (staged("zero-3"), {"model": late}),
    (staged(ZERO_1), {"model": late, "precision": "fp16", "clip_norm": 1.0}),
    (staged("zero-2"), {"optimizer": "lamb"}),
    (staged(RING, expert=1), {"optimizer": "lamb", "recompute": "full"}),
    (staged(RING), {"precision": "bf16", "recompute": "full"}),
]
PARTS: list[tuple[ss.Strategy, dict[str, Any]]] = [
    (mesh(RING, context=2), {"optimizer": "lamb", "clip_norm": 1.0, "recompute": "full"}),
    (mesh("zero-3", context=2, context_comm="ulysses"), {"optimizer": "lamb"}),
    (mesh(RING, context=4, expert=4), {"clip_norm": 1.0}),
    (mesh(ZERO_1, context=2, context_comm="ring"), {"precision": "bf16"}),
    (mesh(RING, context=2, tensor=2), {"recompute": "selective"}),
    (staged(RING, context=2), {"optimizer": "lamb", "clip_norm": 1.0}),
]
EIGHT: list[tuple[ss.Strategy, dict[str, Any]]] = [
    (staged(RING), {"optimizer": "lamb", "clip_norm": 1.0}),
    (staged(ZERO_1), {"optimizer": "lamb", "clip_norm": 1.0}),
    (staged("zero-3"), {"optimizer": "lamb", "clip_norm": 1.0}),
    (staged(RING, tensor=2), {"clip_norm": 1.0}),
    (staged("zero-2", context=2), {"optimizer": "lamb"}),
]


def hold(pool: RankPool, strategy: ss.Strategy, folder: Path, **settings: Any) -> None:
    """Assert that ranks with an even load send what is predicted, hold it, and save it within one percent."""
    fields = {"world_size": pool.world_size, "model": even, **settings}
    job = job_of(strategy=strategy, **fields)
    trace = traced(job).table.step
    assert trace is not None
    events = run_on(pool, job, folder)
    assert hold_traffic(job, trace, events) > 0
    if strategy.expert > 1:
        said = job.strategy.traffic(JobStep(job, trace, job.steps))[A2A]
        assert sent(events, job.steps) == said.bytes.tolist()
    hold_states(job, trace, events)
    if job.recompute != "none" and strategy.stages.schedule.splits_backward:
        return  # recomputation in the halves of a backward pass is an estimate
    for predicted, measured in hold_compared(job, folder)["memory", "activations"].by_rank:
        assert measured == pytest.approx(predicted, rel=0.01)


def label(value: Any) -> str:
    if isinstance(value, ss.Strategy):
        return f"{value.label}-{value.stages.label}"
    return "-".join(f"{name}={getattr(each, '__name__', each)}" for name, each in value.items())


@pytest.mark.slow
@pytest.mark.ranks(4)
def test_stages_send_and_hold_what_is_predicted(pool: RankPool, tmp_path: Path) -> None:
    hold(pool, staged(), tmp_path, optimizer="lamb", clip_norm=1.0)


@pytest.mark.slow
@pytest.mark.ranks(4)
@pytest.mark.parametrize(
    ("strategy", "settings"),
    [*STAGED[:1], *(pytest.param(*each, marks=pytest.mark.weekly) for each in STAGED[1:])],
    ids=label,
)
def test_other_stages_cost_what_they_say(
    pool: RankPool, tmp_path: Path, strategy: ss.Strategy, settings: dict[str, Any]
) -> None:
    hold(pool, strategy, tmp_path, **settings)


@pytest.mark.weekly
@pytest.mark.ranks(4)
@pytest.mark.parametrize(("strategy", "settings"), PARTS, ids=label)
def test_parts_of_sequences_cost_what_they_say(
    pool: RankPool, tmp_path: Path, strategy: ss.Strategy, settings: dict[str, Any]
) -> None:
    hold(pool, strategy, tmp_path, **settings)


@pytest.mark.weekly
@pytest.mark.parametrize(("strategy", "settings"), EIGHT, ids=label)
def test_experts_that_several_ranks_hold_cost_what_they_say(
    eight: RankPool, tmp_path: Path, strategy: ss.Strategy, settings: dict[str, Any]
) -> None:
    hold(eight, strategy, tmp_path, **settings)


def test_stages_pass_one_number_for_each_sequence_with_its_activations() -> None:
    fields: dict[str, Any] = {"batch": ss.Batch(16, micro_batch=2)}
    passed = ss.predict(job_of(routed, staged(), **fields)).traffic
    assert passed is not None
    crossing = next(sent for name, sent in passed.items() if name.startswith("pipeline:send"))
    micro_batches, bytes_of_one = 4, 2 * (32 * 32 + 1) * 4
    assert crossing.bytes.tolist() == [micro_batches * bytes_of_one] * 4


def test_a_simulated_pipeline_of_experts_sends_what_is_predicted() -> None:
    job = job_of("moe-nano", staged(), clip_norm=1.0, batch=ss.Batch(16, micro_batch=2))
    found = ss.predict(job)
    assert ss.simulate.step_events(job).sent_bytes == found.sent_bytes.tolist()
    assert found.step_time_s == pytest.approx(ss.simulate.predicted(found).step_time_s, rel=0.2)


def test_uneven_loads_in_stages_are_refused_in_a_sentence() -> None:
    job = job_of("moe-nano", staged(), batch=ss.Batch(16, micro_batch=2))
    with pytest.raises(SpecError, match="expert_loads is not available for a job with a pipeline"):
        ss.predict(job, expert_loads=[[1 / 8] * 8])
