"""What an observed training loop is described as, and the states that are predicted from it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import shardscope as ss
from observe.steps import train
from shardscope.prediction.observed import ObservedPrediction
from shardscope.runlog.schema import is_readable
from shardscope.runtime.observe._describe import Seen
from shardscope.runtime.record.rundir import RunDir
from shardscope.spec import Record
from shardscope.spec.numbers import LARGEST_DEGREE


def build() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 9), nn.Tanh(), nn.Linear(9, 2))


def groups(model: nn.Module, **second: Any) -> list[dict[str, Any]]:
    return [{"params": model[0].parameters()}, {"params": model[2].parameters(), **second}]  # type: ignore[index]


@pytest.mark.parametrize("kind", ["momentum in one group", "half of the model", "all of it"])
def test_optimizer_state_is_that_of_the_parameters_in_the_groups(tmp_path: Path, kind: str) -> None:
    model = build()
    optimizer: torch.optim.Optimizer = torch.optim.AdamW(model.parameters())
    if kind == "momentum in one group":
        optimizer = torch.optim.SGD(groups(model, momentum=0.9), lr=0.1)
    elif kind == "half of the model":
        optimizer = torch.optim.AdamW(model[2].parameters())  # type: ignore[index]
    with ss.observe(model, optimizer, root=tmp_path) as run:
        train(model, optimizer)
    states = ss.predict(run.job).states
    (memory,) = run.events("memory")
    assert states is not None
    assert states.is_exact
    for name in ("parameters", "gradients", "optimizer"):
        assert memory[name] == getattr(states, name)[0], name


def test_the_state_of_a_group_with_other_rules_is_unknown() -> None:
    model = build()
    optimizer = torch.optim.AdamW(groups(model, amsgrad=True))
    job = Seen(model, optimizer, None, Record(), 1).job()
    assert job.optimizer.name == "AdamW"
    assert ObservedPrediction(job).states is None


def test_the_state_of_parameters_outside_the_model_is_not_predicted_exactly() -> None:
    model, loss = build(), nn.Linear(3, 3)
    optimizer = torch.optim.AdamW([*model.parameters(), *loss.parameters()])
    states = ObservedPrediction(Seen(model, optimizer, None, Record(), 1).job()).states
    assert states is not None
    assert not states.is_exact


def test_any_number_of_ranks_and_any_name_are_accepted(tmp_path: Path) -> None:
    job = Seen(build(), None, "experiment " * 40, Record(), 4096).job()
    directory = RunDir.create(job, tmp_path)
    read = directory.read_job()
    assert (read.world_size, read.name) == (4096, job.name)
    assert directory.rank_file(LARGEST_DEGREE - 1).name == "rank-1048575.jsonl"
    directory.rank_file(4095).write_text('{"event":"end","t":1,"rank":4095,"state":"completed"}\n')
    assert is_readable({"event": "end", "t": 1.0, "rank": LARGEST_DEGREE - 1, "state": "completed"})
    assert [event["rank"] for event in ss.Run.attach(directory.path).events("end")] == [4095]
