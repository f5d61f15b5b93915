"""What routers have done in a step is written once, whatever is recomputed, and the balance loss evens it out."""

from __future__ import annotations

import json
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest
import torch
from torch import nn

import shardscope as ss
from shardscope.runlog.reducer import RunLog
from shardscope.runlog.writer import EventWriter
from shardscope.spec.mixture import RoutedMixture
from shardscope.spec.models import GPTConfig
from shardscope.training.context import RankContext
from shardscope.training.meter import Meter
from shardscope.training.models import build_model
from shardscope.training.models.mixture import experts_of
from shardscope.training.trainer import Trainer


def model_of(**fields: Any) -> nn.Module:
    mixture = RoutedMixture(**{"experts": 4, "active": 2, "ffn": 8, **fields})
    model = build_model(GPTConfig(layers=2, hidden=16, heads=2, vocab=256, seq=16, mixture=mixture))
    with torch.no_grad():
        for _, layer in experts_of(model):
            layer.router.weight[0].fill_(0.0)
            layer.router.weight[1:] *= 5
    return model


def log_of(folder: Path, steps: int = 2, fields: dict[str, Any] | None = None, **changes: Any) -> RunLog:
    folder.mkdir()
    job = ss.Job(
        model=lambda: model_of(**(fields or {})), data="python-source", strategy="single", steps=steps,
        batch=ss.Batch(16, micro_batch=4), **{"optimizer": ss.Optimizer("adamw", lr=3e-3), **changes},
    )  # fmt: skip
    torch.set_num_threads(1)
    with EventWriter(folder / "rank-0.jsonl", 0) as events:
        trainer = Trainer(job, RankContext(0, 1, torch.device("cpu"), Meter(), events), folder)
        for step in range(1, steps + 1):
            trainer.take_step(step)
    log = RunLog(world_size=1)
    log.feed(map(json.loads, (folder / "rank-0.jsonl").read_text().splitlines()))
    return log


def test_every_choice_of_a_step_is_counted_once_with_recomputation_or_without(tmp_path: Path) -> None:
    logs = {mode: log_of(tmp_path / mode, recompute=mode).experts for mode in ("none", "selective", "full")}
    loads = logs["none"].newest[2]
    assert logs["none"].layers == ("blocks.0.ffn", "blocks.1.ffn")
    assert [sum(layer) for layer in loads.assigned] == [16 * 16 * 2] * 2
    assert loads.sequences == 16
    assert not any(map(sum, loads.dropped))
    assert all(log.newest == logs["none"].newest for log in logs.values())


def test_drops_are_what_exceeds_the_capacity(tmp_path: Path) -> None:
    loads = log_of(tmp_path / "run", fields={"active": 1, "capacity_factor": 0.5}).experts.newest[1]
    capacity = 16 * 2  # sequences x half of 16 tokens over 4 experts
    for assigned, dropped in zip(loads.assigned, loads.dropped, strict=True):
        assert sum(dropped) >= 16 * 16 / 2
        assert all(there - lost <= capacity for there, lost in zip(assigned, dropped, strict=True))


@pytest.mark.slow
def test_a_skewed_router_is_mended_by_the_balance_loss_with_its_default_weight(tmp_path: Path) -> None:
    """Weight 0.01 is enough at a learning rate at which routers do not run away in Adam's first steps."""
    default, ends = RoutedMixture.model_fields["balance"].default, {}
    for balance in (0.0, default):
        fields = {"balance": balance, "active": 1}
        optimizer = ss.Optimizer("adamw", lr=1e-3)
        figures = log_of(
            tmp_path / str(balance), steps=60, fields=fields, optimizer=optimizer
        ).experts.figures
        ends[balance] = fmean(figures[step].imbalance for step in range(51, 61))
        first = figures[1].imbalance
    assert ends[default] < 0.95 * first
    assert ends[default] < 0.6 * ends[0.0]
