"""Every built-in strategy and pipeline schedule passes what those of one's own must pass."""

from __future__ import annotations

import json

import pytest

import shardscope as ss
from shardscope.spec import registry

STRATEGIES = [name for name in registry.names(ss.Strategy) if name not in ("single", "pipeline")]
"""One process has no other to agree with; a pipeline is tried with each of its schedules."""


@pytest.mark.weekly
@pytest.mark.parametrize("name", STRATEGIES)
def test_a_strategy_passes_the_tests_for_ones_own(name: str) -> None:
    ss.check_method(registry.require_known(ss.Strategy, name))


@pytest.mark.weekly
@pytest.mark.parametrize("name", registry.names(ss.PipelineSchedule))
def test_a_pipeline_schedule_passes_the_tests_for_ones_own(name: str) -> None:
    ss.check_method(registry.require_known(ss.PipelineSchedule, name))


def test_jobs_of_earlier_versions_are_read() -> None:
    job = ss.Job(model="mlp", data="digits", strategy=ss.Pipeline(schedule="gpipe"), world_size=2)
    strategy = {"name": "pipeline", "schedule": "gpipe", "virtual_stages": None}
    fields = {"model": "mlp", "data": "digits", "world_size": 2, "strategy": strategy}
    assert ss.Job.from_json(json.dumps(fields)) == job


@pytest.mark.parametrize("name", ["ring", "gossip", "hierarchical", "parameter-server", "pipeline", "zero-3"])
def test_a_strategy_derived_from_a_built_in_one_has_a_label_of_its_own(name: str) -> None:
    base = registry.require_known(ss.Strategy, name)
    assert type("Mine", (base,), {"name": "mine"})().label.partition(":")[0] == "mine"


@pytest.mark.parametrize(
    ("asked", "label"),
    [
        ("ring:2", "ring:2"),
        (ss.Zero3, "zero-3"),
        ({"name": "hierarchical", "per_node": 2}, "hierarchical:2"),
        (ss.Strategy("gossip", mix_every=3), "gossip:3"),
        (ss.Pipeline(schedule=ss.PipelineSchedule("zb-h1")), "pipeline:zb-h1"),
    ],
)
def test_a_strategy_is_given_in_many_ways(asked: object, label: str) -> None:
    strategy = ss.Job(model="mlp", data="digits", strategy=asked, world_size=4).strategy
    assert strategy.label == label
    assert ss.Strategy(label) == strategy
