"""Replicas of a divided model: each data-parallel strategy follows one process, as it does with whole models."""

from __future__ import annotations

import pytest

import shardscope as ss
from conformance.strategy import StrategyConformance


def mesh(data: ss.Strategy | str = "ring", tensor: int = 2, **settings: bool) -> ss.Strategy:
    return ss.Strategy("mesh", data=data, tensor=tensor, **settings)


@pytest.mark.ranks(2, 4)
class TestMesh(StrategyConformance):
    strategy = mesh(ss.Ring(bucket_mb=0.02))


@pytest.mark.weekly
@pytest.mark.ranks(4)
class TestMeshOfATree(StrategyConformance):
    strategy = mesh(ss.Tree(bucket_mb=0.02))


@pytest.mark.weekly
@pytest.mark.ranks(4)
class TestMeshOfAllReduce(StrategyConformance):
    strategy = mesh(ss.AllReduce(bucket_mb=0.02))


@pytest.mark.weekly  # the slow tier has ZeRO 1 in the random layouts of tests/oracle/test_hybrid.py
@pytest.mark.ranks(4)
class TestMeshOfZero1(StrategyConformance):
    strategy = mesh(ss.Zero1(bucket_mb=0.02))


@pytest.mark.weekly
@pytest.mark.ranks(4)
class TestMeshOfZero2(StrategyConformance):
    strategy = mesh(ss.Zero2())


@pytest.mark.slow
@pytest.mark.ranks(4)
class TestMeshOfZero3(StrategyConformance):
    strategy = mesh(ss.Zero3())


@pytest.mark.slow
@pytest.mark.ranks(2, 4)
class TestSequenceParallel(StrategyConformance):
    strategy = mesh(ss.Ring(bucket_mb=0.02), sequence_parallel=True)


@pytest.mark.weekly
@pytest.mark.ranks(4)
class TestSequenceParallelWithZero1(StrategyConformance):
    strategy = mesh(ss.Zero1(bucket_mb=0.02), sequence_parallel=True)


@pytest.mark.weekly
@pytest.mark.ranks(4)
class TestSequenceParallelWithZero3(StrategyConformance):
    strategy = mesh(ss.Zero3(), sequence_parallel=True)
