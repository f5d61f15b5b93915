"""Predictions for jobs whose model has experts: the job's traced step agrees with the formulas of its layout."""

from __future__ import annotations

import pytest

import shardscope as ss
from shardscope.analytic.compute.flops import forward_flops
from shardscope.prediction.traced import traced
from shardscope.spec.models import MODELS, GPTConfig

MIXED = [name for name, config in MODELS.items() if isinstance(config, GPTConfig) and config.mixture is not None]


@pytest.mark.parametrize("name", MIXED)
def test_a_traced_model_has_the_parameters_and_the_flops_of_its_description(name: str) -> None:
    table = traced(ss.Job(model=name, data="python-source", batch=4)).table
    model = ss.Model.of(name)
    assert sum(layer.num_params for layer in table.layers) == model.num_params
    assert sum(layer.flops for layer in table.layers) == forward_flops(model)


@pytest.mark.parametrize("name", MIXED)
def test_states_of_a_job_are_those_of_its_layout(name: str) -> None:
    cluster = ss.Cluster.of("a100-80gb", nodes=1, per_node=2)
    job = ss.Job(model=name, data="python-source", world_size=2, batch=16, strategy="zero-1")
    of_job, of_layout = ss.predict(job, cluster), ss.predict(ss.Model.of(name), cluster, job.layout())
    for kind in ("parameters", "gradients", "optimizer"):
        assert of_job.memory.find(kind).value == pytest.approx(of_layout.memory.find(kind).value, rel=1e-3)
