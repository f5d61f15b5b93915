"""Experts in the stages of a pipeline, on one rank or several: the stages follow one process, also when tokens drop."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import shardscope as ss
from conformance.alone import context_for
from conformance.one_process import follow, hold_evaluation, mixed
from conformance.ranks import RankPool
from conformance.strategy import job
from shardscope.runlog.experts import ExpertLog
from shardscope.training.context import RankContext
from shardscope.training.models.in_order import InOrder
from shardscope.training.trainer import Trainer

ZERO_1 = ss.Zero1(bucket_mb=0.02)
SCHEDULES = (
    "1f1b", "dualpipev", "gpipe", "interleaved", "v-half", "v-min", "zb-h1", "zb-h2", "zbv", "zero-bubble"
)  # fmt: skip


def dropless() -> nn.Module:
    """The first stage has a layer without experts, and both stages have layers with experts."""
    return mixed(4, shared_ffn=8, dense_layers=1)


def dropping() -> nn.Module:
    return mixed(4, active=1, capacity_factor=0.5)


def mesh(data: Any = "ring", schedule: str = "1f1b", **settings: Any) -> ss.Strategy:
    settings = {"expert": 2, "pipeline": 2, "stages": ss.Pipeline(schedule=schedule), **settings}
    return ss.Strategy("mesh", data=data, **settings)


def partly_evaluated() -> nn.Module:
    model = dropless()
    model.blocks[1].eval()  # type: ignore[operator,index]
    return model


@pytest.mark.parametrize("make", [dropless, dropping, partly_evaluated])
def test_layers_in_order_compute_what_the_model_does(make: Any) -> None:
    model, tokens = make(), torch.randint(256, (3, 16))
    whole, in_order = model(tokens), InOrder(model)(tokens)
    for name in ("logits", "balance_loss"):
        assert torch.equal(whole[name], in_order[name]) or torch.allclose(
            whole[name], in_order[name], rtol=1e-6
        )
    model.eval()
    assert torch.equal(model(tokens), InOrder(model)(tokens))


@pytest.mark.weekly  # the slow tier has such stages in the random layouts of tests/oracle/test_hybrid.py
@pytest.mark.ranks(2)
def test_stages_with_whole_experts_follow_one_process(pool: RankPool, tmp_path: Path) -> None:
    follow(pool, tmp_path, ss.Pipeline(schedule="zb-h1"), dropping, recompute="full", micro_batch=12)


@pytest.mark.ranks(4)
@pytest.mark.parametrize(
    ("data", "schedule"),
    [
        (ss.Ring(bucket_mb=0.02), "1f1b"),
        pytest.param(ZERO_1, "zbv", marks=pytest.mark.weekly),
        pytest.param(ss.Zero3(), "1f1b", marks=pytest.mark.slow),
    ],
)
def test_stages_with_other_experts_follow_one_process(
    pool: RankPool, tmp_path: Path, data: Any, schedule: str
) -> None:
    follow(pool, tmp_path, mesh(data, schedule), dropless, micro_batch=6 if schedule == "zbv" else 12)


@pytest.mark.weekly
@pytest.mark.ranks(4)
@pytest.mark.parametrize("data", ["ring", "all-reduce", ZERO_1, ss.Zero2(), ss.Zero3()])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_every_schedule_follows_one_process(pool: RankPool, tmp_path: Path, schedule: str, data: Any) -> None:
    follow(pool, tmp_path, mesh(data, schedule), dropping, recompute="full")


@pytest.mark.weekly
@pytest.mark.ranks(4)
@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
@pytest.mark.parametrize(("precision", "optimizer"), [("fp64", "lars"), ("fp32", "adamw")])
@pytest.mark.parametrize("settings", [{}, {"expert": 1}, {"tensor": 2, "expert": 1}], ids=str)
def test_settings_follow_one_process(
    pool: RankPool, tmp_path: Path, settings: dict[str, int], precision: str, optimizer: str, recompute: str
) -> None:
    changes = {"precision": precision, "optimizer": optimizer, "recompute": recompute}
    follow(pool, tmp_path, mesh(**settings), dropless, **changes)


# Eight ranks.


@pytest.mark.weekly
@pytest.mark.parametrize(
    "settings",
    [
        {"data": "ring"},
        {"data": "ring", "expert": 4},
        {"data": ZERO_1},
        {"data": ss.Zero2()},
        {"data": ss.Zero3()},
        {"tensor": 2},
        {"tensor": 2, "data": ZERO_1},
        {"tensor": 2, "data": ss.Zero3()},
        {"tensor": 2, "schedule": "interleaved"},
    ],
    ids=str,
)
@pytest.mark.parametrize("precision", ["fp64", "fp32"])
def test_three_axes_follow_one_process(
    eight: RankPool, tmp_path: Path, settings: dict[str, Any], precision: str
) -> None:
    follow(eight, tmp_path, mesh(**settings), dropless, precision=precision)


# What stages record, evaluate and resume.


def _recorded(ours: ss.Job, context: RankContext) -> list[dict[str, Any]]:
    trainer = Trainer(ours, context, context.events.path.parent)
    trainer.take_step(1)
    trainer.strategy.close()
    events = map(json.loads, context.events.path.read_text().splitlines())
    return [event for event in events if event["event"] == "experts"]


def _log_of(rows: list[list[dict[str, Any]]]) -> ExpertLog:
    log = ExpertLog()
    for event in (event for events in rows for event in events):
        log.take(event)
    return log


@pytest.mark.ranks(4)
def test_all_stages_record_the_loads_of_their_layers(pool: RankPool, tmp_path: Path) -> None:
    ours = job(strategy=mesh(), world_size=4, batch=ss.Batch(48, micro_batch=6), model=dropping)
    alone = job(strategy="single", world_size=1, batch=ss.Batch(48, micro_batch=48), model=dropping)
    found, (whole, *_) = (
        pool.run(partial(body, one), _folder(tmp_path / body.__name__))
        for body, one in ((_recorded, ours), (_alone, alone))
    )
    found, expected = _log_of(found), _log_of([whole])
    assert found.layers == expected.layers
    assert found.newest[1].assigned == expected.newest[1].assigned
    assert found.newest[1].dropped == expected.newest[1].dropped
    assert found.figures[1] == pytest.approx(expected.figures[1], rel=1e-12)
    assert found.figures[1].dropped > 0.3


def _folder(path: Path) -> Path:
    path.mkdir()
    return path


def _alone(ours: ss.Job, context: RankContext) -> list[dict[str, Any]]:
    here = context_for(ours, context)
    return _recorded(ours, here) if context.rank == 0 else []


@pytest.mark.slow
@pytest.mark.ranks(4)
@pytest.mark.parametrize("data", ["zero-3"])
def test_an_evaluation_changes_nothing(pool: RankPool, tmp_path: Path, data: str) -> None:
    ours = job(strategy=mesh(data), world_size=4, batch=ss.Batch(48, micro_batch=6), model=dropless)
    hold_evaluation(pool, tmp_path, ours)
