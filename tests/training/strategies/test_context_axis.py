"""Sequences divided over context ranks: each way to communicate follows one process, as whole sequences do."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
from torch import nn

import shardscope as ss
from conformance.alone import context_for
from conformance.ranks import RankPool
from conformance.strategy import Result, StrategyConformance, job, mean_losses, relative_difference, train
from shardscope.spec.models import GPTConfig
from shardscope.training.context import RankContext
from shardscope.training.models import build_model


def mesh(comm: str, data: ss.Strategy | str = "ring", context: int = 2, **settings: int) -> ss.Strategy:
    return ss.Strategy("mesh", data=data, context=context, context_comm=comm, **settings)


@pytest.mark.ranks(2)
class TestAllGather(StrategyConformance):
    strategy = mesh("all-gather", ss.Ring(bucket_mb=0.02))


@pytest.mark.weekly
@pytest.mark.ranks(2, 4)
class TestRing(StrategyConformance):
    strategy = mesh("ring", ss.AllReduce(bucket_mb=0.02))


@pytest.mark.weekly
@pytest.mark.ranks(2, 4)
class TestUlysses(StrategyConformance):
    strategy = mesh("ulysses", ss.Tree(bucket_mb=0.02))


@pytest.mark.weekly  # the slow tier has it in the random layouts of tests/oracle/test_hybrid.py
@pytest.mark.ranks(4)
class TestRingOfZero3(StrategyConformance):
    strategy = mesh("ring", ss.Zero3())


@pytest.mark.weekly
@pytest.mark.ranks(4)
class TestAllGatherOfZero1(StrategyConformance):
    strategy = mesh("all-gather", ss.Zero1(bucket_mb=0.02))


@pytest.mark.weekly
@pytest.mark.ranks(4)
class TestUlyssesOfZero2(StrategyConformance):
    strategy = mesh("ulysses", ss.Zero2())


@pytest.mark.slow
@pytest.mark.ranks(4)
class TestAllGatherBesideTensor(StrategyConformance):
    strategy = mesh("all-gather", tensor=2)


@pytest.mark.weekly
@pytest.mark.ranks(4)
class TestRingBesideTensor(StrategyConformance):
    strategy = mesh("ring", tensor=2)


@pytest.mark.weekly
@pytest.mark.ranks(4)
class TestRingOfReplicas(StrategyConformance):
    strategy = mesh("ring", ss.Zero3(replicas=2))


def long_gpt() -> nn.Module:
    """A small GPT for causal sequences of 4,096 tokens."""
    return build_model(GPTConfig(layers=2, hidden=16, heads=4, vocab=256, seq=4096, ffn=32))


def _alone(ours: ss.Job, context: RankContext) -> Result | None:
    return train(ours, context_for(ours, context)) if context.rank == 0 else None


@pytest.mark.weekly
@pytest.mark.ranks(4)
@pytest.mark.parametrize("context", [2, 4])
@pytest.mark.parametrize("comm", ["all-gather", "ring", "ulysses"])
def test_long_causal_sequences_follow_one_process(
    pool: RankPool, tmp_path: Path, comm: str, context: int
) -> None:
    one = job(model=long_gpt, strategy="single", world_size=1, batch=2, steps=4, optimizer="adamw")
    ours = one.replace(strategy=mesh(comm, context=context), world_size=4)
    alone, *_ = pool.run(partial(_alone, one), tmp_path)
    results = pool.run(partial(train, ours), tmp_path)
    assert mean_losses(results) == pytest.approx(mean_losses([alone]), rel=1e-9)
    for _, parameters in results:
        assert relative_difference(parameters, alone[1]) < 1e-9
