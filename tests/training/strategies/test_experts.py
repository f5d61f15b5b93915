"""Models with experts: every data-parallel strategy follows one process, also when tokens are dropped."""

from __future__ import annotations

from typing import ClassVar

import pytest
from torch import nn

import shardscope as ss
from conformance.strategy import Case, StrategyConformance
from shardscope.spec.mixture import RoutedMixture
from shardscope.spec.models import GPTConfig
from shardscope.training.models import build_model

CASES: list[Case] = [("fp64", 1, "selective", None), ("fp64", 3, "full", 0.5), ("fp32", 3, "none", 0.5)]


def dropless() -> nn.Module:
    """Two choices among four experts, after a layer without experts, beside a shared expert."""
    mixture = RoutedMixture(experts=4, active=2, ffn=8, shared_ffn=8, dense_layers=1)
    return build_model(GPTConfig(layers=2, hidden=16, heads=2, vocab=256, seq=16, ffn=32, mixture=mixture))


def dropping() -> nn.Module:
    """One choice, and room for half of an even load, so that at least half of all tokens are dropped."""
    mixture = RoutedMixture(experts=4, active=1, ffn=8, capacity_factor=0.5, balance=0.1)
    return build_model(GPTConfig(layers=1, hidden=16, heads=2, vocab=256, seq=16, mixture=mixture))


class Experts(StrategyConformance):
    model = staticmethod(dropless)
    cases: ClassVar[list[Case]] = CASES


@pytest.mark.ranks(2)
class TestExpertsOnARing(Experts):
    strategy = ss.Ring(bucket_mb=0.02)


@pytest.mark.slow
@pytest.mark.ranks(4)
class TestDropsOnARing(Experts):
    strategy = ss.Ring(bucket_mb=0.02)
    model = staticmethod(dropping)


@pytest.mark.weekly
@pytest.mark.ranks(2)
class TestExpertsOnATree(Experts):
    strategy = ss.Tree(bucket_mb=0.02)


@pytest.mark.weekly
@pytest.mark.ranks(2)
class TestExpertsWithAllReduce(Experts):
    strategy = ss.AllReduce(bucket_mb=0.02)


@pytest.mark.weekly
@pytest.mark.ranks(4)
class TestExpertsWithHierarchy(Experts):
    strategy = ss.Hierarchical(bucket_mb=0.02)


@pytest.mark.weekly
@pytest.mark.ranks(2)
class TestExpertsWithZero1(Experts):
    strategy = ss.Zero1(bucket_mb=0.02)


@pytest.mark.weekly
@pytest.mark.ranks(2)
class TestExpertsWithZero2(Experts):
    strategy = ss.Zero2()


@pytest.mark.slow
@pytest.mark.ranks(2)
class TestExpertsWithZero3(Experts):
    strategy = ss.Zero3()
    model = staticmethod(dropping)


@pytest.mark.weekly
@pytest.mark.ranks(4)
class TestExpertsInTensorParts(Experts):
    strategy = ss.Strategy("mesh", data=ss.Ring(bucket_mb=0.02), tensor=2)
