"""The peak of a training step, predicted from shapes, against the peak that torch's own `MemTracker` sees."""

from __future__ import annotations

import pytest
import torch
from torch.distributed._tools.mem_tracker import MemTracker

import shardscope as ss
from shardscope.analytic.memory.module import module_memory
from shardscope.errors import SpecError
from shardscope.spec.model import Model
from shardscope.training.loss import cross_entropy
from shardscope.training.models import build_model
from shardscope.training.optim import build_optimizer

CPU = torch.device("cpu")
TOLERANCE = 0.02


def rows_for(name: str, batch: int) -> tuple[torch.Tensor, torch.Tensor]:
    if name.startswith("gpt"):
        tokens = torch.randint(256, (batch, 65))
        return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
    return torch.rand(batch, 1, 8, 8), torch.randint(10, (batch,))


def measured_peak(name: str, batch: int, optimizer: str) -> int:
    """Of the second step: states and what the optimizer works in are there from its start."""
    model, (inputs, targets) = build_model(name), rows_for(name, batch)
    ours = build_optimizer(ss.Optimizer(optimizer), model.named_parameters())
    cross_entropy(model(inputs), targets).backward()
    ours.step()
    ours.zero_grad(set_to_none=True)
    tracker = MemTracker()
    tracker.track_external(model, ours, inputs, targets, *getattr(ours, "work_space", ()))
    with tracker:
        cross_entropy(model(inputs), targets).backward()
        ours.step()
    return int(tracker.get_tracker_snapshot("peak")[CPU]["Total"])


@pytest.mark.parametrize("optimizer", ["adamw", "lamb"])
@pytest.mark.parametrize(
    ("name", "batch"), [("mlp", 64), ("cnn", 8), ("resnet", 8), ("gpt-nano", 8), ("gpt-micro", 2)]
)
def test_the_peak_is_within_two_percent(name: str, batch: int, optimizer: str) -> None:
    """Traced on two samples, whatever the batch."""
    model, (inputs, targets) = build_model(name), rows_for(name, 2)
    predicted = module_memory(
        Model.from_module(model, inputs),
        batch=batch,
        scores_bytes=model(inputs).nbytes / 2,
        optimizer=optimizer,
        data_bytes=(inputs.nbytes + targets.nbytes) / 2,
    )
    measured = measured_peak(name, batch, optimizer)
    assert predicted.peak == pytest.approx(measured, rel=TOLERANCE)


def test_a_step_of_no_samples_is_refused() -> None:
    table = Model.from_module(build_model("mlp"), torch.zeros(2, 64))
    with pytest.raises(SpecError, match="batch=0"):
        module_memory(table, batch=0, scores_bytes=40)
