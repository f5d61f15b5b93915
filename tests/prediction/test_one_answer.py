"""One job has one step time: by a model's name or by its function, as a job or as a layout."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from torch import Tensor, nn

import shardscope as ss
from shardscope.errors import SpecError
from shardscope.prediction.job import JobPrediction
from shardscope.prediction.job_time import job_time_term
from shardscope.spec.model import Transformer
from shardscope.spec.pipeline_schedule import PipelineSchedule
from shardscope.spec.registry import names
from shardscope.spec.strategy import Strategy
from shardscope.training.models import build_model

PRECISIONS = ("fp32", "bf16-mixed", "fp16-mixed")
SCHEDULES = [f"pipeline:{name}" for name in names(PipelineSchedule)]
STRATEGIES = sorted({*names(Strategy)} - {"single", "pipeline"} | {*SCHEDULES, "parameter-server:async"})
CASES = [
    (strategy, precision, devices)
    for devices in (8, 2, 64, 1)
    for precision in PRECISIONS
    for strategy in STRATEGIES
]


def gpt_nano() -> nn.Module:
    return build_model("gpt-nano")


def gpt_small() -> nn.Module:
    return build_model("gpt-small")


def predicted(
    model: str | Callable[[], nn.Module], strategy: str | Strategy, devices: int, **settings: Any
) -> JobPrediction:
    job = ss.Job(
        model=model, data="python-source", strategy=strategy if devices > 1 else "single", world_size=devices,
        batch=ss.Batch(global_batch=4 * devices, micro_batch=2), **settings,
    )  # fmt: skip
    nodes = max(1, devices // 8)
    return ss.predict(
        job, ss.Cluster.of("a100-80gb", nodes=nodes, per_node=devices // nodes), software="fsdp2"
    )


@pytest.mark.sampled
@pytest.mark.parametrize(("strategy", "precision", "devices"), CASES)
def test_a_model_has_one_time_and_one_memory_by_name_by_function_and_in_a_layout(
    strategy: str, precision: str, devices: int
) -> None:
    """A pipeline of eight stages needs a deeper model; one of 64 stages is refused, and so a case without it."""
    name, build = (
        ("gpt-small", gpt_small) if strategy in SCHEDULES and devices == 8 else ("gpt-nano", gpt_nano)
    )
    try:
        named = predicted(name, strategy, devices, precision=precision)
    except SpecError as error:
        pytest.skip(str(error))  # such as more pipeline stages than layers
    wrapped = predicted(build, strategy, devices, precision=precision)
    assert named.step_time_s == wrapped.step_time_s
    assert named.peak_bytes == wrapped.peak_bytes
    assert named.interval == wrapped.interval
    assert named.cluster is not None
    model = wrapped.found.table.as_transformer
    assert isinstance(model, Transformer)
    try:
        layout = named.job.layout()
    except SpecError as error:
        assert "has no corresponding layout" in str(error)
        return
    found = ss.predict(model, named.cluster, layout, software="fsdp2")
    assert named.step_time_s == pytest.approx(found.step_time_s, rel=1e-12)
    assert named.peak_bytes == pytest.approx(found.peak_bytes, rel=0.02)


@pytest.mark.sampled
@pytest.mark.parametrize("recompute", ["none", "full"])
@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "interleaved", "zb-h1", "zb-h2", "zero-bubble"])
@pytest.mark.parametrize("model", ["gpt-small", "gpt-124m"])
def test_the_stages_of_a_job_need_as_much_memory_as_those_of_its_layout(
    model: str, schedule: str, precision: str, recompute: str
) -> None:
    """A job's layers are split by time, those of a layout evenly: with a large vocabulary these differ.

    In a split backward pass, torch recomputes a layer for each of its weights, as in layouts, but a job only once for
    all of them.
    """
    blocks = {"gpt-small": 8, "gpt-124m": 12}[model]
    chosen = ss.PipelineSchedule(schedule)
    for ranks in (2, 4):
        stages = ranks * (chosen.most_stages or chosen.default_stages)
        if blocks % stages:
            continue
        each = blocks // stages
        split = (each + 1, *[each] * (stages - 2), each + 1)
        job = predicted(
            model,
            ss.Pipeline(schedule=schedule, split=split),
            ranks,
            precision=precision,
            recompute=recompute,
        )
        layout = job.as_layout
        assert layout is not None
        assert job.cluster is not None
        found = ss.predict(layout[0], job.cluster, layout[1], software="fsdp2")
        if chosen.splits_backward and recompute == "full":
            assert 0.5 * found.peak_bytes < job.peak_bytes < 1.05 * found.peak_bytes, ranks
        else:
            assert job.peak_bytes == pytest.approx(found.peak_bytes, rel=0.02), ranks


MEMORY_CASES = [
    pytest.param(model, strategy, precision, recompute, marks=[pytest.mark.weekly] if (m + s + p) % 3 else [])
    for m, model in enumerate(("gpt-mini", "gpt-small", "gpt-124m"))
    for s, strategy in enumerate(("ring", "zero-1", "zero-2", "zero-3"))
    for p, precision in enumerate(PRECISIONS)
    for recompute in ("none", "full")
]
"""A third of them run in each full tier: any two of model, strategy and precision together, with each recomputation."""


@pytest.mark.slow
@pytest.mark.parametrize(("model", "strategy", "precision", "recompute"), MEMORY_CASES)
def test_a_job_needs_as_much_memory_as_its_layout(
    model: str, strategy: str, precision: str, recompute: str
) -> None:
    """Selective recomputation is left out: that of a layout is torchtitan's, which keeps other tensors."""
    for devices in (1, 2, 8, 64):
        job = predicted(model, strategy, devices, precision=precision, recompute=recompute)
        layout = job.as_layout
        assert layout is not None
        assert job.cluster is not None
        held = ss.predict(layout[0], job.cluster, layout[1], software="fsdp2").peak_bytes
        assert job.peak_bytes == pytest.approx(held, rel=0.02), devices


@pytest.mark.parametrize("devices", [1, 8])
@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
def test_a_strategy_without_a_layout_computes_as_long_as_one_that_has_one(
    recompute: str, devices: int
) -> None:
    """Passes, recomputation and launches are those of the layout; only messages and the update differ."""
    replicas = predicted("gpt-nano", "ring", 8, recompute=recompute).time
    gossip = predicted("gpt-nano", "gossip", 8, recompute=recompute).time
    assert replicas is not None
    assert gossip is not None
    kinds = ("compute", "recomputation", "launches and fixed cost")
    layout = sum(part.value for part in replicas.parts if part.name in kinds)
    job = gossip["forward"].value + gossip["backward"].value + gossip["fixed cost"].value
    assert job == pytest.approx(layout, rel=1e-9)


def test_fp64_is_slower_than_fp32_and_equal_shares_are_no_shares() -> None:
    half, whole = (
        predicted("gpt-nano", "gossip", 8, precision=name).step_time_s for name in ("fp32", "fp64")
    )
    assert half is not None
    assert whole is not None
    assert half < whole < 2 * half
    cluster = ss.Cluster.of("a100-80gb", per_node=4)
    job = ss.Job(model="gpt-nano", data="python-source", strategy="ring", world_size=4, batch=16)
    shared = job.replace(batch=ss.Batch(16, shares=(4, 4, 4, 4)))
    assert ss.predict(shared, cluster).step_time_s == ss.predict(job, cluster).step_time_s


def test_the_model_of_a_job_has_the_same_name_in_a_layout() -> None:
    job = predicted("gpt-nano", "zero-2", 8)
    assert job.cluster is not None
    named = ss.predict("gpt-nano", job.cluster, job.job.layout(), software="fsdp2")
    assert named.step_time_s == pytest.approx(job.step_time_s, rel=1e-12)
    assert named.peak_bytes == pytest.approx(job.peak_bytes, rel=0.02)
    with pytest.raises(SpecError, match="model='mlp' is not known"):
        ss.Model.of("mlp")


class TwoTowers(nn.Module):
    """A model that is no transformer: the sum over its operations remains its time."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(64, 10), nn.Linear(64, 10)

    def forward(self, images: Tensor) -> Tensor:
        rows = images.flatten(1)
        scores: Tensor = self.one(rows) * self.two(rows)
        return scores


def test_a_model_that_is_no_transformer_is_the_sum_over_its_operations() -> None:
    job = ss.Job(model=TwoTowers, data="digits", strategy="ring", world_size=4, batch=32)
    found = ss.predict(job, ss.Cluster.of("a100-80gb", per_node=4))
    assert found.as_layout is None
    assert found.rates.passes is None
    assert found.time is not None
    assert found.time["forward"]["matrix products"].value > 0


@pytest.mark.slow
@pytest.mark.parametrize("device", ["a100-80gb", "h100-80gb", "v100-32gb"])
@pytest.mark.parametrize("model", ["gpt-nano", "gpt-mini", "gpt-25m", "gpt-124m"])
def test_traced_operations_take_about_as_long_as_the_layers_that_they_are(model: str, device: str) -> None:
    """So a transformer that is not recognised, and what else a model does, is predicted on the same ground."""
    for samples in (1, 8, 64):
        job = ss.Job(
            model=model, data="python-source", strategy="single", batch=ss.Batch(samples, micro_batch=samples),
            precision="fp16-mixed" if device == "v100-32gb" else "bf16-mixed",
        )  # fmt: skip
        found = ss.predict(job, ss.Cluster.of(device, per_node=1))
        passes, traced = (
            sum(time[name].value for name in ("forward", "backward"))
            for rates in (found.rates, found.rates._replace(passes=None))
            for time in [job_time_term(found.step, found.found, found.traffic, rates)]
        )
        assert traced == pytest.approx(passes, rel=0.15), samples
