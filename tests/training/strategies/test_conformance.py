"""Every strategy there is follows one process."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

import pytest

import shardscope as ss
from conformance.ranks import RankPool
from conformance.strategy import FullConformance, StrategyConformance
from shardscope.spec.strategy import strategies


class TestAllReduce(FullConformance):
    strategy = ss.AllReduce(bucket_mb=0.02)  # several buckets even for a tiny model


class TestRing(FullConformance):
    strategy = ss.Ring(bucket_mb=0.02)


@pytest.mark.parametrize("optimizer", ["adamw", "lamb"])
def test_a_ring_in_both_directions_follows_one_process(
    pool: RankPool, tmp_path: Path, optimizer: str
) -> None:
    both = StrategyConformance()
    both.strategy = ss.Ring(directions=2)  # type: ignore[misc]
    both.follow(pool, tmp_path, optimizer=optimizer, precision="fp64", accumulation=4)


BY_THEIR_OWN_PROPERTY = {"single", "gossip"}  # the oracle itself; and who never agrees on one gradient


def test_every_strategy_joins_the_matrix(monkeypatch: pytest.MonkeyPatch) -> None:
    for path in Path(__file__).parent.glob("test_*.py"):
        found = spec_from_file_location(f"joining_{path.stem}", path)
        assert found is not None
        assert found.loader is not None
        module = module_from_spec(found)
        monkeypatch.setitem(sys.modules, module.__name__, module)  # dataclasses look their module up there
        found.loader.exec_module(module)
    tested = {ss.Strategy.resolve(cls.strategy).name for cls in _all_below(StrategyConformance)}
    assert tested == {*strategies(), "mesh"} - BY_THEIR_OWN_PROPERTY


def _all_below(cls: type[StrategyConformance]) -> Iterator[type[StrategyConformance]]:
    for below in cls.__subclasses__():
        if hasattr(below, "strategy"):
            yield below
        yield from _all_below(below)
