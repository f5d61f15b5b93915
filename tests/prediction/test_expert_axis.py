"""What ranks with different experts send and hold, against what real ranks have counted, to the byte."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import shardscope as ss
from conformance.ranks import RankPool
from prediction.ranks_of import EVERY_STEP, Events, hold_compared, hold_states, hold_traffic, run_on
from shardscope.analytic.communication.experts import all_to_all_bytes
from shardscope.analytic.job_step import JobStep
from shardscope.measure.compare.comparison import Comparison
from shardscope.methods.strategies.mesh import Mesh
from shardscope.prediction.traced import traced
from shardscope.runtime import Run
from shardscope.runtime.record.rundir import RunDir
from shardscope.spec.mixture import RoutedMixture
from shardscope.spec.models import GPTConfig
from shardscope.training.models import build_model
from shardscope.training.models.mixture import experts_of
from shardscope.training.models.routing import Router, Routes

HIDDEN, EXPERTS, LAYERS, SEQ = 32, 8, 2, 32
MIXTURE = {"experts": EXPERTS, "active": 2, "ffn": 48}
A2A = "expert:all_to_all"


class EvenRouter(Router):
    """Sends every expert as many tokens as any other, whatever their scores."""

    def forward(self, x: torch.Tensor) -> Routes:  # type: ignore[override]
        routes = super().forward(x)
        even = torch.arange(routes.experts.numel(), device=x.device) % self.mixture.experts
        return routes._replace(experts=even.view(routes.experts.shape))


def config_of(**mixture: Any) -> GPTConfig:
    return GPTConfig(
        layers=LAYERS, hidden=HIDDEN, heads=2, vocab=256, seq=SEQ, mixture=RoutedMixture(**MIXTURE, **mixture)
    )


def routed(**mixture: Any) -> nn.Module:
    return build_model(config_of(**mixture))


def even(**mixture: Any) -> nn.Module:
    model = routed(**mixture)
    for _, layer in experts_of(model):
        layer.router.__class__ = EvenRouter
    return model


def mesh(data: Any, expert: int = 2, **settings: Any) -> ss.Strategy:
    return ss.Strategy("mesh", data=data, expert=expert, **settings)


RING = ss.Ring(bucket_mb=0.02, slice_mb=0.01)
OTHERS = [
    (mesh(ss.AllReduce(bucket_mb=0.02)), {"recompute": "full"}),
    (mesh(RING, expert=4), {"optimizer": "lamb", "clip_norm": 1.0}),
    (mesh(ss.Zero1(bucket_mb=0.02)), {"optimizer": "lamb", "clip_norm": 1.0, "batch": 16}),
    (mesh("zero-3"), {"optimizer": "lamb", "clip_norm": 1.0, "recompute": "full"}),
    (mesh(RING, tensor=2), {"optimizer": "lamb", "clip_norm": 1.0, "recompute": "full"}),
    (mesh("zero-2"), {"recompute": "selective"}),
    (mesh("zero-1", tensor=2), {"optimizer": "lamb", "clip_norm": 1.0}),
    (mesh("zero-3", tensor=2), {"batch": 16}),
    (mesh(RING, tensor=2), {"precision": "bf16"}),
    (mesh("zero-3", expert=4), {"batch": 16}),
    (mesh("zero-1", expert=4), {"optimizer": "lamb", "precision": "fp16", "batch": 16}),
    (mesh(ss.Tree(slice_mb=0.01)), {"optimizer": "sgd"}),
    (mesh(ss.Hierarchical(slice_mb=0.01)), {"precision": "fp64", "recompute": "selective"}),
    (mesh(RING), {"precision": "bf16", "recompute": "full"}),
    (mesh(RING), {"precision": "fp16", "clip_norm": 1.0}),
]


def name_of(value: Any) -> str:
    return getattr(value, "label", None) or str(value)


def job_of(model: Any, strategy: ss.Strategy, **fields: Any) -> ss.Job:
    fields = {"steps": 3, "record": EVERY_STEP, "batch": ss.Batch(16, micro_batch=2), **fields}
    return ss.Job(model=model, data="python-source", strategy=strategy, **{"world_size": 4, **fields})


def hold_against(pool: RankPool, job: ss.Job, folder: Path) -> tuple[list[Events], Comparison]:
    """Assert that ranks send and hold what is predicted in each step, and that `compare` agrees."""
    trace = traced(job).table.step
    assert trace is not None
    events = run_on(pool, job, folder)
    hold_states(job, trace, events)
    assert hold_traffic(job, trace, events) > 0
    return events, hold_compared(job, folder)


def sent(events: Sequence[Events], step: int) -> list[int]:
    """Bytes of all-to-alls that each rank has sent in a step."""
    (found,) = zip(
        *(
            [
                row["traffic"].get(A2A, {"sent_bytes": 0})["sent_bytes"]  # a stage may have no experts
                for row in each
                if row["event"] == "step" and row["step"] == step
            ]
            for each in events
        ),
        strict=True,
    )
    return [*found]


def hold_even(pool: RankPool, job: ss.Job, folder: Path) -> None:
    """Assert that ranks with an even load of experts send, and save for backward passes, what is predicted."""
    events, found = hold_against(pool, job, folder)
    trace = traced(job).table.step
    assert trace is not None
    traffic = job.strategy.traffic(JobStep(job, trace, job.steps))
    assert sent(events, job.steps) == traffic[A2A].bytes.tolist()
    for kind in ("activations", "peak"):
        for predicted, measured in found["memory", kind].by_rank:
            assert measured == pytest.approx(predicted, rel=0.01), kind


@pytest.mark.ranks(4)
def test_ranks_with_an_even_load_send_and_hold_what_is_predicted(pool: RankPool, tmp_path: Path) -> None:
    hold_even(pool, job_of(even, mesh(RING), optimizer="lamb", clip_norm=1.0, batch=16), tmp_path)


@pytest.mark.slow
@pytest.mark.ranks(4)
@pytest.mark.parametrize(("strategy", "settings"), OTHERS[:5], ids=name_of)
def test_settings_cost_what_they_say(
    pool: RankPool, tmp_path: Path, strategy: ss.Strategy, settings: dict[str, Any]
) -> None:
    hold_even(pool, job_of(even, strategy, **settings), tmp_path)


@pytest.mark.weekly
@pytest.mark.ranks(4)
@pytest.mark.parametrize(("strategy", "settings"), OTHERS[5:], ids=name_of)
def test_other_settings_cost_what_they_say(
    pool: RankPool, tmp_path: Path, strategy: ss.Strategy, settings: dict[str, Any]
) -> None:
    hold_even(pool, job_of(even, strategy, **settings), tmp_path)


@pytest.mark.slow
@pytest.mark.ranks(4)
@pytest.mark.parametrize(("expert", "precision"), [(2, "bf16"), (4, "fp32")])
def test_an_uneven_load_is_within_the_bounds_and_its_bytes_follow_from_it(
    pool: RankPool, tmp_path: Path, expert: int, precision: str
) -> None:
    job = job_of(routed, mesh(RING, expert), precision=precision)
    events, found = hold_against(pool, job, tmp_path)
    loads = [
        np.subtract(event["assigned"], event["dropped"])
        for event in sorted(Run(RunDir(tmp_path), job).events(), key=lambda event: event.get("rank", 0))
        if event["event"] == "experts" and event["step"] == job.steps
    ]
    short = 2 if precision == "bf16" else 4
    for first in range(0, 4, expert):
        said = all_to_all_bytes(
            np.stack(loads[first : first + expert]), hidden=HIDDEN, element_bytes=4, output_bytes=short,
            micro_batches=job.num_micro_batches,
        )  # fmt: skip
        assert sent(events, job.steps)[first : first + expert] == said.tolist()
    row = found["bytes", A2A]
    assert row.predicted != row.measured
    assert row.agrees
    assert row.bounds is not None
    assert any("even load" in note for note in found.notes)


def test_the_bytes_of_a_step_are_those_of_its_tokens() -> None:
    """Worked by hand: ranks keep half of their choices, and send the other half in four directions."""
    job = job_of("moe-nano", mesh("ring"), batch=ss.Batch(16, micro_batch=4))
    found = ss.predict(job)
    choices = 4 * 64 * 2  # of the only micro-batch: samples, tokens, experts of a token
    rows, counts = choices // 2 * 4, 8 // 2 * 8
    assert found.traffic is not None
    assert found.traffic[A2A].bytes.tolist() == [4 * (rows * 64 * 4 + counts)] * 4
    assert found.traffic[A2A].bounds is not None
    assert found.states is not None
    (whole,) = {*ss.predict(job.replace(strategy="ring")).states.parameters.tolist()}
    experts = 4 * 8 * (2 * 64 * 128 + 64 + 128) * 4
    assert found.states.parameters.tolist() == [whole - experts // 2] * 4


def test_a_simulated_step_sends_and_takes_what_is_predicted() -> None:
    job = job_of("moe-nano", mesh("ring"), clip_norm=1.0, recompute="full")
    found = ss.predict(job)
    assert ss.simulate.step_events(job).sent_bytes == found.sent_bytes.tolist()
    assert found.step_time_s == pytest.approx(ss.simulate.predicted(found).step_time_s, rel=0.05)
    assert found.time is not None
    (term,) = [term for term in found.time.walk() if term.name == A2A]
    assert term.value > 0
    assert "even load" in term.source


def test_without_an_expert_axis_nothing_has_changed() -> None:
    """Each rank has a whole replica of a model with experts, and nothing is sent but its gradients."""
    layout = ss.Layout(data=4, expert=1, global_batch=16, micro_batch=4)
    found = ss.predict(ss.Job(model="moe-nano", data="python-source", layout=layout))
    each = 4 * ss.Model.of("moe-nano").num_params
    assert each == 2_482_688
    assert found.traffic is not None
    assert [*found.traffic] == ["ring_all_reduce"]
    assert found.traffic["ring_all_reduce"].bytes.tolist() == [2 * 3 * each // 4] * 4
    assert found.states is not None
    assert found.states.parameters.tolist() == found.states.gradients.tolist() == [each] * 4
    assert found.held_bytes == pytest.approx(17_471_464, rel=0.01)  # as before there was an expert axis
    assert not any("even load" in sentence for sentence in found.assumptions)


def test_neighbours_have_different_experts() -> None:
    strategy = mesh("ring")
    assert isinstance(strategy, Mesh)
    assert strategy.groups("data", 4) == [[0, 1, 2, 3]]
    assert strategy.groups("expert", 4) == [[0, 1], [2, 3]]
    assert strategy.groups("expert-data", 4) == [[0, 2], [1, 3]]
