"""Parts of sequences whose tokens go to experts: capacity and balance loss stay those of whole sequences."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from torch import nn

import shardscope as ss
from conformance.ranks import RankPool
from conformance.strategy import StrategyConformance
from shardscope.spec.mixture import RoutedMixture
from shardscope.spec.models import GPTConfig
from shardscope.training.models import build_model

COMMS = ("all-gather", "ring", "ulysses")


def mixed(**mixture: Any) -> nn.Module:
    settings = {"experts": 8, "active": 2, "ffn": 8, "balance": 0.1, **mixture}
    return build_model(
        GPTConfig(layers=3, hidden=16, heads=4, vocab=256, seq=16, ffn=32, mixture=RoutedMixture(**settings))
    )


def dropless() -> nn.Module:
    return mixed(shared_ffn=8, dense_layers=1)


def dropping() -> nn.Module:
    """On two ranks, as many experts as tokens of a part, whose places must not be taken for positions."""
    return mixed(capacity_factor=0.5)


def mesh(comm: str, **settings: Any) -> ss.Strategy:
    return ss.Strategy("mesh", **{"context": 2, "context_comm": comm, "expert": 2, **settings})


def follow(
    pool: RankPool, folder: Path, strategy: ss.Strategy, model: Any = dropping, **changes: Any
) -> None:
    """Hold losses and parameters against one process."""
    micro_batch = changes.pop("micro_batch", 6)

    class OfParts(StrategyConformance):
        def batch(self, world_size: int, accumulation: int) -> ss.Batch:
            return ss.Batch(48, micro_batch=micro_batch)

    OfParts.strategy, OfParts.model = strategy, staticmethod(model)
    OfParts().follow(pool, folder, **{"optimizer": "lamb", "precision": "fp64", "clip_norm": 0.5, **changes})


@pytest.mark.slow
@pytest.mark.ranks(2)
@pytest.mark.parametrize(
    ("comm", "expert"), [("ring", 2), pytest.param("ulysses", 1, marks=pytest.mark.weekly)]
)
def test_parts_of_sequences_follow_one_process(
    pool: RankPool, tmp_path: Path, comm: str, expert: int
) -> None:
    follow(pool, tmp_path, mesh(comm, expert=expert), micro_batch=24)


@pytest.mark.weekly
@pytest.mark.ranks(4)
@pytest.mark.parametrize("model", [dropless, dropping])
@pytest.mark.parametrize("comm", COMMS)
@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"expert": 4},
        {"context": 4, "expert": 4},
        {"data": ss.Zero1(bucket_mb=0.02)},
        {"data": ss.Zero2()},
        {"data": ss.Zero3()},
        {"tensor": 2},
        {"pipeline": 2},
    ],
    ids=str,
)
@pytest.mark.parametrize("precision", ["fp64", "fp32"])
def test_every_other_axis_follows_one_process(
    pool: RankPool, tmp_path: Path, settings: dict[str, Any], comm: str, model: Any, precision: str
) -> None:
    follow(pool, tmp_path, mesh(comm, **settings), model, precision=precision)


@pytest.fixture(scope="module")
def eight() -> Iterator[RankPool]:
    pool = RankPool(8)
    yield pool
    pool.close()


@pytest.mark.weekly
@pytest.mark.parametrize("comm", COMMS)
@pytest.mark.parametrize(
    "settings",
    [
        {"pipeline": 2},
        {"pipeline": 2, "data": ss.Zero3(), "expert": 4},
        {"pipeline": 2, "data": ss.Zero1(bucket_mb=0.02)},
        {"pipeline": 2, "tensor": 2},
        {"pipeline": 2, "stages": ss.Pipeline(schedule="zbv")},
        {"tensor": 2},
        {"tensor": 2, "data": ss.Zero3()},
    ],
    ids=str,
)
def test_three_and_four_axes_follow_one_process(
    eight: RankPool, tmp_path: Path, settings: dict[str, Any], comm: str
) -> None:
    follow(eight, tmp_path, mesh(comm, **settings))
