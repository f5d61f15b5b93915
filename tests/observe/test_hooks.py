"""Hooks on an observed model: what copies, pickles and `torch.compile` make of them."""

from __future__ import annotations

import copy
import io
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel

import shardscope as ss
from observe.steps import train


class Net(nn.Module):
    """Two layers."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        super().__init__()
        self.first, self.second = nn.Linear(5, 9), nn.Linear(9, 2)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(inputs).tanh())


def averaged(model: nn.Module) -> nn.Module:
    return AveragedModel(model).module


def saved(model: nn.Module) -> nn.Module:
    file = io.BytesIO()
    torch.save(model, file)
    assert b"shardscope" not in file.getvalue()  # it can be loaded where Shardscope is not installed
    file.seek(0)
    loaded: nn.Module = torch.load(file, weights_only=False)
    return loaded


@pytest.mark.parametrize("copied", [copy.deepcopy, averaged, saved])
def test_a_copy_of_the_model_works_and_is_not_observed(
    tmp_path: Path, copied: Callable[[nn.Module], nn.Module]
) -> None:
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with ss.observe(model, optimizer, root=tmp_path) as run:
        twin = copied(copied(model))
        train(twin, torch.optim.SGD(twin.parameters(), lr=0.1))
        with torch.no_grad():
            twin(torch.ones(50, 5))
        train(model, optimizer)
    assert torch.equal(twin(torch.ones(6, 5)), model(torch.ones(6, 5)))
    assert [event["samples"] for event in run.events("step")] == [6, 6, 6]
    assert run.job.num_micro_batches == 1


@pytest.mark.filterwarnings("error:.*Dynamo.*")
@pytest.mark.parametrize("how", ["in place", "wrapped", "wrapped and observed"])
def test_a_compiled_model_is_observed_and_compiled_once(tmp_path: Path, how: str) -> None:
    from torch._dynamo.utils import counters

    torch._dynamo.reset()
    model = Net()
    run_model: nn.Module = model
    if how == "in place":
        model.compile(fullgraph=True, backend="eager")
    else:
        run_model = torch.compile(model, fullgraph=True, backend="eager")  # type: ignore[assignment]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    counters.clear()
    for _ in range(9):  # one more than Dynamo compiles again
        observed = run_model if how == "wrapped and observed" else model
        with ss.observe(observed, optimizer, root=tmp_path) as run:
            train(run_model, optimizer, 2)
    assert run.reason is None
    assert [event["samples"] for event in run.events("step")] == [6, 6]
    assert len(run.timeline().query("name == 'forward'")) == 2
    assert counters["stats"]["unique_graphs"] == 1
    assert not counters["graph_break"]
    assert model._compiled_call_impl is None or how == "in place"


def test_a_function_that_is_compiled_as_a_whole_runs_as_without(tmp_path: Path) -> None:
    torch._dynamo.reset()
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    @torch.compile(fullgraph=True, backend="eager")
    def loss(inputs: torch.Tensor) -> torch.Tensor:
        return model(inputs).square().mean()

    with warnings.catch_warnings(), ss.observe(model, optimizer, root=tmp_path) as run:
        warnings.simplefilter("error")
        train(loss, optimizer)
    assert [event["samples"] for event in run.events("step")] == [0, 0, 0]
    assert run.metrics()["loss"].notna().all()
    assert set(run.timeline()["name"]) == {"backward", "optimizer"}
