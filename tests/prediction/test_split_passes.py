"""What ranks that recompute layers send, hold and take if backward passes are split, against what they have counted."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import shardscope as ss
from conformance.one_process import follow
from conformance.ranks import RankPool
from prediction.ranks_of import EVERY_STEP, hold_compared, hold_states, hold_traffic, run_on
from prediction.test_expert_axis import A2A, even, sent
from shardscope.analytic.job_step import JobStep
from shardscope.errors import SpecError
from shardscope.prediction.traced import traced
from shardscope.spec.models import GPTConfig
from shardscope.training.models import build_model

AXES: dict[str, dict[str, Any]] = {
    "tensor": {"data": "ring", "tensor": 2},
    "sequence": {"data": "ring", "tensor": 2, "sequence_parallel": True},
    "expert": {"data": ss.Ring(bucket_mb=0.02, slice_mb=0.01), "expert": 2},
    "zero-3": {"data": "zero-3"},
    "context": {"data": "ring", "context": 2, "context_comm": "ring"},
}
CASES = [
    (axis, schedule, recompute)
    for axis in AXES
    for schedule in ("zb-h1", "zbv", "v-half")
    for recompute in ("full", "selective")
]


def mesh(axis: str, schedule: str, **stages: Any) -> ss.Strategy:
    return ss.Strategy("mesh", pipeline=2, stages=ss.Pipeline(schedule=schedule, **stages), **AXES[axis])


def hold(pool: RankPool, folder: Path, axis: str, schedule: str, recompute: str) -> None:
    """Assert that ranks send and hold what is predicted in each step, and save it within one percent."""
    job = ss.Job(
        model=even if axis == "expert" else "gpt-nano", data="python-source", world_size=4, steps=3,
        strategy=mesh(axis, schedule, split="even"), batch=ss.Batch(16, micro_batch=2), record=EVERY_STEP,
        clip_norm=1.0, recompute=recompute,
    )  # fmt: skip
    trace = traced(job).table.step
    assert trace is not None
    events = run_on(pool, job, folder)
    assert hold_traffic(job, trace, events) > 0
    said = job.strategy.traffic(JobStep(job, trace, job.steps))
    assert {name for name, each in said.items() if each.bounds is not None} <= {A2A}
    if axis == "expert":
        assert sent(events, job.steps) == said[A2A].bytes.tolist()
    hold_states(job, trace, events)
    for predicted, measured in hold_compared(job, folder)["memory", "activations"].by_rank:
        assert measured == pytest.approx(predicted, rel=0.01)


@pytest.mark.slow
@pytest.mark.ranks(4)
def test_recomputed_layers_send_what_is_predicted_in_both_passes(pool: RankPool, tmp_path: Path) -> None:
    hold(pool, tmp_path, "tensor", "zbv", "full")


@pytest.mark.weekly
@pytest.mark.ranks(4)
@pytest.mark.parametrize(("axis", "schedule", "recompute"), CASES)
def test_every_axis_sends_and_holds_what_is_predicted(
    pool: RankPool, tmp_path: Path, axis: str, schedule: str, recompute: str
) -> None:
    hold(pool, tmp_path, axis, schedule, recompute)


def deep_gpt() -> nn.Module:
    """Five layers, enough for two stages on each of two ranks."""
    return build_model(GPTConfig(layers=3, hidden=16, heads=2, vocab=256, seq=16, ffn=32))


@pytest.mark.weekly
@pytest.mark.ranks(4)
@pytest.mark.parametrize(("axis", "schedule", "recompute"), CASES)
def test_every_axis_follows_one_process(
    pool: RankPool, tmp_path: Path, axis: str, schedule: str, recompute: str
) -> None:
    model = even if axis == "expert" else deep_gpt
    follow(pool, tmp_path, mesh(axis, schedule), model, recompute=recompute)


def equal_layers() -> nn.Module:
    return nn.Sequential(nn.Flatten(), *(nn.Linear(64, 64) for _ in range(8)))


def test_a_split_backward_pass_takes_as_long_as_it_recomputes() -> None:
    """On all stages but the first, both passes of a split backward pass recompute."""
    cluster = ss.Cluster.emulated(nodes=4, flops="1 MFLOP/s")

    def job(schedule: str) -> ss.Job:
        return ss.Job(
            model=equal_layers, data="digits", world_size=4, batch=ss.Batch(64, micro_batch=8), recompute="full",
            strategy=ss.Pipeline(schedule=schedule, split=(3, 2, 2, 2)),
        )  # fmt: skip

    once, split = (ss.predict(job(schedule), cluster) for schedule in ("1f1b", "zb-h1"))
    assert split.time["backward"].value / once.time["backward"].value == pytest.approx((2 + 1 + 3 / 4) / 3)
    simulated = ss.simulate(job("zb-h1"), cluster)
    assert simulated.step_time_s == pytest.approx(split.step_time_s, rel=0.05)


def nested() -> nn.Module:
    """Five layers, two of which are three layers each unless they are recomputed."""
    inner = (nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 32)) for _ in range(2))
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 32), *inner, nn.Linear(32, 10))


def of_nested(schedule: str, **fields: Any) -> ss.Job:
    return ss.Job(
        model=nested, data="digits", world_size=2, steps=2, batch=ss.Batch(64, micro_batch=8), record=EVERY_STEP,
        strategy=ss.Pipeline(schedule=schedule, split="even"), **fields,
    )  # fmt: skip


def test_a_recomputed_sequential_is_one_layer_of_a_pipeline() -> None:
    for recompute, layers in (("none", 9), ("full", 5), ("selective", 5)):
        trace = traced(of_nested("zb-h1", recompute=recompute)).table.step
        assert trace is not None
        assert len(trace.pieces) == layers
        assert all(recompute in piece.split for piece in trace.pieces)


@pytest.mark.slow
@pytest.mark.ranks(2)
@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1"])
def test_ranks_with_recomputed_sequentials_send_and_hold_what_is_predicted(
    pool: RankPool, tmp_path: Path, schedule: str
) -> None:
    job = of_nested(schedule, recompute="full")
    trace = traced(job).table.step
    assert trace is not None
    events = run_on(pool, job, tmp_path)
    assert hold_traffic(job, trace, events) > 0
    hold_states(job, trace, events)
    for predicted, measured in hold_compared(job, tmp_path)["memory", "activations"].by_rank:
        assert measured == pytest.approx(predicted, rel=0.01)


class Reentrant(nn.Linear):
    """A layer whose gradients PyTorch can only compute all at once."""

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(super().forward, x, use_reentrant=True)  # type: ignore[no-any-return]


def with_reentrant(schedule: str, split: tuple[int, int]) -> ss.Job:
    layers = [nn.Flatten(), nn.Linear(64, 64), Reentrant(64, 64), nn.Linear(64, 10)]
    return ss.Job(
        model=lambda: nn.Sequential(*layers), data="digits", world_size=2, device="cpu", steps=2,
        batch=ss.Batch(64, micro_batch=8), strategy=ss.Pipeline(schedule=schedule, split=split),
    )  # fmt: skip


def test_a_layer_whose_backward_pass_cannot_be_split_is_refused_after_the_first_stage() -> None:
    assert ss.predict(with_reentrant("1f1b", (2, 2))).step_time_s is not None
    assert ss.predict(with_reentrant("zb-h1", (3, 1))).step_time_s is not None
    with pytest.raises(SpecError, match=r"layer 3 of 4 \(.*checkpoint.*\); use a schedule such as '1f1b'"):
        _ = ss.predict(with_reentrant("zb-h1", (2, 2))).step_time_s


@pytest.mark.slow
def test_a_run_refuses_a_stage_whose_backward_pass_cannot_be_split() -> None:
    with pytest.raises(ss.RunFailed, match=r"stage 2 of 2 \(.*checkpoint.*\); use a schedule such as '1f1b'"):
        ss.launch(with_reentrant("zb-h1", (2, 2))).wait(60)
