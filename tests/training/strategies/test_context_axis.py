"""Sequences divided over context ranks: each way to communicate follows one process, as whole sequences do."""

from __future__ import annotations

import pytest

import shardscope as ss
from conformance.strategy import StrategyConformance


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
