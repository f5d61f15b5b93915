"""Every strategy there is follows one process."""

from __future__ import annotations

from pathlib import Path

import pytest

import shardscope as ss
from conformance.ranks import RankPool
from conformance.strategy import StrategyConformance
from shardscope.spec import STRATEGIES


class TestAllReduce(StrategyConformance):
    strategy = ss.AllReduce(bucket_mb=0.02)  # several buckets even for a tiny model


class TestRing(StrategyConformance):
    strategy = ss.Ring(bucket_mb=0.02)


@pytest.mark.parametrize("optimizer", ["adamw", "lamb"])
def test_a_ring_in_both_directions_follows_one_process(
    pool: RankPool, tmp_path: Path, optimizer: str
) -> None:
    both = StrategyConformance()
    both.strategy = ss.Ring(directions=2)  # type: ignore[misc]
    both.follow(pool, tmp_path, optimizer=optimizer, precision="fp64", accumulation=4)


def test_every_strategy_joins_the_matrix() -> None:
    tested = {cls.strategy.kind for cls in StrategyConformance.__subclasses__()}
    assert tested == set(STRATEGIES) - {"single"}
