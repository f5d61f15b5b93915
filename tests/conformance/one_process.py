"""A job on a pool of ranks beside the same job on one process, for what the matrix of strategies does not try."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from torch import nn

import shardscope as ss
from conformance.alone import evaluated, losses_alone
from conformance.ranks import RankPool
from conformance.strategy import StrategyConformance, mean_losses, train
from shardscope.spec.mixture import RoutedMixture
from shardscope.spec.models import GPTConfig
from shardscope.training.models import build_model


def mixed(experts: int, **mixture: Any) -> nn.Module:
    """A GPT of three layers with experts, enough for two stages on each of two ranks, and for two axes of heads."""
    routed = RoutedMixture(experts=experts, **{"active": 2, "ffn": 8, "balance": 0.1, **mixture})
    return build_model(GPTConfig(layers=3, hidden=16, heads=4, vocab=256, seq=16, ffn=32, mixture=routed))


def follow(
    pool: RankPool,
    folder: Path,
    strategy: ss.Strategy,
    model: Callable[[], nn.Module],
    *,
    micro_batch: int = 6,
    **changes: Any,
) -> None:
    """Assert that losses and parameters of a job with so many samples in a micro-batch are those of one process."""

    class Held(StrategyConformance):
        def batch(self, world_size: int, accumulation: int) -> ss.Batch:
            return ss.Batch(48, micro_batch=micro_batch)

    Held.strategy, Held.model = strategy, staticmethod(model)
    Held().follow(pool, folder, **{"optimizer": "lamb", "precision": "fp64", "clip_norm": 0.5, **changes})


def hold_losses(pool: RankPool, folder: Path, ours: ss.Job) -> None:
    """Assert that the losses of a job are those of one process."""
    expected, *_ = pool.run(partial(losses_alone, _alone(ours)), folder)
    assert mean_losses(pool.run(partial(train, ours), folder)) == pytest.approx(expected, rel=1e-12)


def hold_evaluation(pool: RankPool, folder: Path, ours: ss.Job) -> None:
    """Assert that an evaluation before the first step gives what one process gives, and leaves the step as it is."""
    (expected, loss), *_ = pool.run(partial(evaluated, _alone(ours)), folder)
    results = pool.run(partial(evaluated, ours), folder)
    for found, _ in results:
        assert found == pytest.approx(expected, rel=1e-12)
    assert mean_losses([([after], {}) for _, after in results]) == pytest.approx([loss], rel=1e-12)


def _alone(ours: ss.Job) -> ss.Job:
    return ours.replace(strategy="single", world_size=1, batch=ours.batch.global_batch)
