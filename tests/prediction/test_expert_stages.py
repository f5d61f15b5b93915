"""What ranks with different experts send and hold in the stages of a pipeline, and with parts of sequences."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from torch import nn

import shardscope as ss
from conformance.ranks import RankPool
from prediction.ranks_of import hold_compared, hold_states, hold_traffic, run_on
from prediction.test_expert_axis import A2A, HIDDEN, RING, even, job_of, mesh, routed, sent
from shardscope.analytic.communication.experts import all_to_all_bytes
from shardscope.analytic.job_step import JobStep
from shardscope.prediction.job import JobPrediction
from shardscope.prediction.traced import traced
from shardscope.runtime import Run
from shardscope.runtime.record.rundir import RunDir
from shardscope.simulator.step import step_events_of

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
    for predicted, measured in hold_compared(job, folder)["memory", "activations"].by_rank:
        assert measured == pytest.approx(predicted, rel=0.01)


@pytest.mark.slow
@pytest.mark.ranks(4)
def test_stages_with_uneven_loads_send_what_these_say(pool: RankPool, tmp_path: Path) -> None:
    """The first of two stages has the first of two layers with experts, and recomputes it."""
    job = job_of(routed, staged(), recompute="full")
    found = sent(run_on(pool, job, tmp_path), job.steps)
    loads = [
        np.subtract(event["assigned"], event["dropped"])
        for event in sorted(Run(RunDir(tmp_path), job).events(), key=lambda event: event.get("rank", 0))
        if event["event"] == "experts" and event["step"] == job.steps
    ]
    assert len(loads) == 4
    for stage in (0, 1):
        ranks = slice(2 * stage, 2 * stage + 2)
        said = all_to_all_bytes(
            np.stack(loads[ranks])[:, [stage]], hidden=HIDDEN, element_bytes=4,
            micro_batches=job.num_micro_batches, forward_passes=2,
        )  # fmt: skip
        assert found[ranks] == said.tolist()
    assert len({*found}) > 1  # an even load has the same bytes in both stages


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


SKEWED, EVEN = (0.3, 0.2, 0.1, 0.1, 0.1, 0.1, 0.05, 0.05), (1 / 8,) * 8
EARLY, LATE = [SKEWED, SKEWED, EVEN, EVEN], [EVEN, EVEN, SKEWED, SKEWED]
CLUSTER = ss.Cluster.emulated(4, "1 Gbit/s", flops="400 MFLOP/s", memory_bandwidth="2 GB/s")


def of_loads(strategy: ss.Strategy, loads: Any = None) -> JobPrediction:
    job = job_of("moe-nano", strategy, batch=ss.Batch(16, micro_batch=2))
    found = ss.predict(job, CLUSTER, expert_loads=loads)
    assert isinstance(found, JobPrediction)
    return found


def extra_flops(strategy: ss.Strategy, loads: Any) -> list[float]:
    """FLOPs by which a forward pass of a sample takes each rank longer than with an even load."""
    uneven, usual = of_loads(strategy, loads), of_loads(strategy)
    works = (each.job.strategy.work(each.step) for each in (uneven, usual))
    return [
        (one.computing - other.computing) * usual.found.table.flops for one, other in zip(*works, strict=True)
    ]


def test_each_stage_computes_for_the_fullest_experts_of_its_own_layers() -> None:
    of_layer = (
        (2 * (0.3 + 0.2 + 0.1 + 0.1) - 1) * 64 * 2 * 2 * 2 * 64 * 128
    )  # tokens, choices, and two products
    for loads, stages in ((EARLY, (1, 0)), (LATE, (0, 1)), ([SKEWED], (1, 1))):
        expected = [2 * of_layer * share for share in stages for _ in range(2)]
        assert extra_flops(staged(), loads) == pytest.approx(expected, rel=1e-6, abs=1)
    assert max(extra_flops(mesh(RING), LATE)) == pytest.approx(2 * of_layer, rel=1e-6)  # without stages


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe", "interleaved", "zb-h1", "zbv"])
def test_uneven_stages_take_as_long_as_simulated_and_send_what_is_predicted(schedule: str) -> None:
    usual, even_load, *uneven = (
        of_loads(staged(schedule=schedule), loads) for loads in (None, [EVEN], EARLY, LATE)
    )
    assert even_load.step_time_s == pytest.approx(usual.step_time_s, rel=1e-12)
    for each in uneven:
        assert each.step_time_s > 1.05 * usual.step_time_s
        assert ss.simulate.predicted(each).step_time_s == pytest.approx(each.step_time_s, rel=0.01)
        assert step_events_of(each).sent_bytes == each.sent_bytes.tolist()
