"""The peak of a training step, predicted from shapes, against the peak that torch's allocator records.

The rules for layers, without a traced step, leave out what kernels take beside their results, as torch's own
`MemTracker` does.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed._tools.mem_tracker import MemTracker

import shardscope as ss
from conformance.allocator import allocated, held_bytes
from conformance.optimizers import build_optimizer
from shardscope.analytic.memory.module import module_memory
from shardscope.errors import SpecError
from shardscope.prediction.traced import traced
from shardscope.spec.model import LayerTable, Model
from shardscope.training.loss import cross_entropy
from shardscope.training.models import build_model, units_of
from shardscope.training.precision import Precision
from shardscope.training.recompute import apply_recompute

CPU = torch.device("cpu")
BY_RULE, TRACED = 0.02, 0.002
"""Of the measured peak. The bar is 2 %."""
RANDOM_STATES = 2 * torch.get_rng_state().nbytes
"""Bytes of the generator's states that a recomputed unit keeps at most: memory that no trace on shapes sees."""
CASES = [("mlp", 64), ("cnn", 8), ("resnet", 8), ("gpt-nano", 8), ("gpt-micro", 2)]


def rows_for(name: str, batch: int) -> tuple[Tensor, Tensor]:
    if name.startswith("gpt"):
        tokens = torch.randint(256, (batch, 65))
        return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
    return torch.rand(batch, 1, 8, 8), torch.randint(10, (batch,))


def measured_peak(
    model: nn.Module,
    rows: tuple[Tensor, Tensor],
    optimizer: str,
    *,
    loss: Callable[[Tensor, Tensor], Tensor] = cross_entropy,
    precision: str = "fp32",
    with_kernels: bool = True,
) -> int:
    """Of the second step: states and what the optimizer works in are there from its start."""
    inputs, targets = rows
    autocast = Precision(precision, CPU).autocast
    ours = build_optimizer(ss.Optimizer(optimizer), model.named_parameters())

    def step() -> None:
        with autocast():
            value = loss(model(inputs), targets)
        value.backward()
        del value
        ours.step()

    step()
    ours.zero_grad(set_to_none=True)
    worked_in = tuple(getattr(ours, "work_space", ()))
    if not with_kernels:
        tracker = MemTracker()
        tracker.track_external(model, ours, inputs, targets, *worked_in)
        with tracker:
            step()
        return int(tracker.get_tracker_snapshot("peak")[CPU]["Total"])
    states = [each for row in ours.state.values() for each in row.values() if isinstance(each, Tensor)]
    held = held_bytes([*model.parameters(), *model.buffers(), *states, inputs, targets, *worked_in])
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # as on a rank
    try:
        return held + allocated(step)[0]
    finally:
        torch.set_num_threads(threads)


@cache
def table_of(name: str, *, memory: bool) -> LayerTable:
    """Traced on two samples, whatever the batch."""
    return Model.from_module(build_model(name), rows_for(name, 2)[0], memory=memory)


def predicted_peak(name: str, batch: int, **fields: Any) -> float:
    inputs, targets = rows_for(name, 1)
    table = table_of(name, memory=True)
    return module_memory(table, batch=batch, data_bytes=inputs.nbytes + targets.nbytes, **fields).peak


@pytest.mark.sampled
@pytest.mark.parametrize("optimizer", ["adamw", "lamb"])
@pytest.mark.parametrize(("name", "batch"), CASES)
def test_the_peak_by_the_rules_for_layers_is_within_two_percent(
    name: str, batch: int, optimizer: str
) -> None:
    model, (inputs, targets) = build_model(name), rows_for(name, 2)
    predicted = module_memory(
        table_of(name, memory=False),
        batch=batch,
        scores_bytes=model(inputs).nbytes / 2,
        optimizer=optimizer,
        data_bytes=(inputs.nbytes + targets.nbytes) / 2,
    )
    measured = measured_peak(model, rows_for(name, batch), optimizer, with_kernels=False)
    assert predicted.peak == pytest.approx(measured, rel=BY_RULE)


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("recompute", "optimizer"), [("none", "adamw"), ("selective", "lamb"), ("full", "adamw")]
)
@pytest.mark.parametrize(("name", "batch"), CASES)
def test_the_traced_peak_is_that_of_the_step_also_with_recomputation(
    name: str, batch: int, recompute: str, optimizer: str
) -> None:
    model = apply_recompute(build_model(name), recompute)  # type: ignore[arg-type]
    measured = measured_peak(model, rows_for(name, batch), optimizer)
    predicted = predicted_peak(name, batch, recompute=recompute, optimizer=optimizer)
    states = RANDOM_STATES * len(units_of(model)) * (recompute != "none")
    if name != "cnn" or "AVX512" in torch.backends.cpu.get_cpu_capability():
        # else oneDNN takes up to four copies of a weight for its images of 2 x 2, which are not predicted
        assert measured - states <= predicted * (1 + TRACED)
    assert predicted <= measured * (1 + TRACED)


LOSSES = {
    "cross-entropy": cross_entropy,
    "smoothed": lambda scores, targets: nn.functional.cross_entropy(scores, targets, label_smoothing=0.1),
    "squares": lambda scores, targets: (
        (scores.softmax(-1) - nn.functional.one_hot(targets, 10)).square().sum(-1).mean()
    ),
}


@pytest.mark.sampled
@pytest.mark.parametrize("recompute", ["none", "full"])
@pytest.mark.parametrize("precision", ["fp32", "bf16-mixed"])
@pytest.mark.parametrize("loss", LOSSES)
def test_a_traced_loss_holds_what_it_holds_in_every_precision(
    loss: str, precision: str, recompute: str
) -> None:
    job = ss.Job(
        model="cnn", data="digits", strategy="single", batch=64, precision=precision, recompute=recompute,
        loss="cross-entropy" if loss == "cross-entropy" else LOSSES[loss],
    )  # fmt: skip
    found = traced(job)
    predicted = module_memory(
        found.table, batch=64, data_bytes=found.sample_bytes, recompute=recompute, optimizer="sgd"
    )
    model = apply_recompute(build_model("cnn"), recompute)  # type: ignore[arg-type]
    measured = measured_peak(model, rows_for("cnn", 64), "sgd", loss=LOSSES[loss], precision=precision)
    states = RANDOM_STATES * len(units_of(model)) * (recompute != "none")
    tolerance = 1 + (0.03 if precision == "bf16-mixed" else TRACED)
    assert measured - states <= predicted.peak * tolerance
    assert predicted.peak <= measured * tolerance


@pytest.mark.slow
def test_a_layerwise_optimizer_works_on_a_batch_of_tensors_at_a_time() -> None:
    """gpt-mini has more elements than fit a batch: its buffer is smaller than its parameters."""
    measured = measured_peak(build_model("gpt-mini"), rows_for("gpt-mini", 1), "lamb")
    assert predicted_peak("gpt-mini", 1, optimizer="lamb") == pytest.approx(measured, rel=TRACED)


class Mixed(nn.Module):
    """Running statistics, and a weight that is used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(64, 64), nn.BatchNorm1d(64)) for _ in range(3))
        self.again = nn.Linear(64, 64, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = self.again(x.flatten(1))
        for block in self.blocks:
            x = block(x).relu()
        return self.again(x)


@pytest.mark.sampled
@pytest.mark.parametrize("batch", [64, 512])
def test_buffers_and_tied_weights_are_counted(batch: int) -> None:
    """64 samples are as many as a weight has rows: its gradient is known by where it goes, not by its shape."""
    rows = torch.rand(batch, 64), torch.randint(64, (batch,))
    table = Model.from_module(Mixed(), torch.zeros(batch, 64), memory=True)
    predicted = module_memory(table, batch=batch, data_bytes=64 * 4 + 8).peak
    assert predicted == pytest.approx(measured_peak(Mixed(), rows, "adamw"), rel=TRACED)


def test_frozen_layers_are_held_and_have_no_gradients() -> None:
    """Not against `MemTracker`, which (torch 2.13) runs no module that has a frozen parameter."""
    model = Mixed()
    model.blocks[1].requires_grad_(requires_grad=False)
    held = module_memory(Model.from_module(model, torch.zeros(2, 64), memory=True), batch=1)
    assert held.parameters == 4 * sum(p.numel() for p in model.parameters())
    assert held.gradients == 4 * sum(p.numel() for p in model.parameters() if p.requires_grad)


def test_the_module_is_left_as_it_is_by_the_trace() -> None:
    model = build_model("gpt-nano")
    before = {
        name: (id(p), p.grad, len(p._post_accumulate_grad_hooks or {}))
        for name, p in model.named_parameters()
    }
    kinds = [type(module) for module in model.modules()]
    Model.from_module(model, rows_for("gpt-nano", 1)[0], memory=True)
    assert kinds == [type(module) for module in model.modules()]
    assert before == {
        name: (id(p), p.grad, len(p._post_accumulate_grad_hooks or {}))
        for name, p in model.named_parameters()
    }


def test_memory_never_grows_with_the_stage_or_with_what_is_recomputed() -> None:
    """At one sample and many: stage 2 also shards gradients, stage 3 parameters; selective stores less, full least."""
    for batch in (1, 64):
        peaks = [predicted_peak("gpt-nano", batch, zero_stage=s, data_parallel=4) for s in (1, 2, 3)]
        assert peaks == sorted(peaks, reverse=True)
    stored = [predicted_peak("gpt-nano", 64, recompute=mode) for mode in ("none", "selective", "full")]
    assert stored == sorted(stored, reverse=True)


def test_a_traced_step_survives_json() -> None:
    table = table_of("resnet", memory=True)
    assert LayerTable.from_json(table.to_json()) == table


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"batch": 0}, "batch=0"),
        ({"recompute": "some"}, "recompute='some'.*'none', 'selective', 'full'"),
        ({"zero_stage": 4}, "zero_stage=4.*use 0, 1, 2 or 3"),
        ({"zero_stage": 3}, "data_parallel=1.*at least 2"),
        ({"data_parallel": 2, "rank": 2}, "rank=2.*use 0 to 1"),
        ({"zero_stage": 1, "data_parallel": 2, "bucket_mb": 0}, "bucket_mb=0"),
        ({"optimizer": "adam"}, "adam"),
    ],
)
def test_a_field_outside_its_range_is_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(SpecError, match=message):
        module_memory(table_of("mlp", memory=True), **{"batch": 1, **fields})


@pytest.mark.parametrize("fields", [{"recompute": "full"}, {"zero_stage": 2, "data_parallel": 2}])
def test_what_needs_a_traced_step_says_so(fields: dict[str, Any]) -> None:
    with pytest.raises(SpecError, match="memory=True"):
        module_memory(table_of("mlp", memory=False), batch=1, scores_bytes=40, **fields)
    with pytest.raises(SpecError, match="scores_bytes"):
        module_memory(table_of("mlp", memory=False), batch=1)


class Scaled(nn.Module):
    """Has a parameter of no dimension."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.scale = nn.Linear(4, 4), nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) * self.scale


def test_a_single_number_is_whole_on_every_rank() -> None:
    table = Model.from_module(Scaled(), torch.zeros(2, 4), memory=True)
    assert module_memory(table, batch=1, zero_stage=1, data_parallel=2).parameters == 4 * 21
    for stage in (2, 3):
        assert module_memory(table, batch=1, zero_stage=stage, data_parallel=2).parameters == 4 * (10 + 1)


def test_a_module_that_learns_nothing_has_no_step_to_trace() -> None:
    with pytest.raises(SpecError, match="does not require grad"):
        Model.from_module(nn.Flatten(), torch.zeros(2, 4), memory=True)
