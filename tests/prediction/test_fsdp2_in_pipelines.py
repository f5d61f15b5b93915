"""FSDP2 in a pipeline: whole gradients until the last micro-batch, in time, memory and simulation."""

from __future__ import annotations

import pytest

import shardscope as ss
from shardscope.prediction.layout import Prediction

MODEL = ss.Model.of("llama-2-13b")
CLUSTER = ss.Cluster.of("h100-80gb", nodes=4)
LAYOUT = ss.Layout(data=4, tensor=2, pipeline=4, zero=2, global_batch=32)


def term(prediction: Prediction, tree: str, name: str) -> float:
    found = [each for each in getattr(prediction, tree).walk() if each.name == name]
    return sum(each.value for each in found)


def exposed(layout: ss.Layout, software: str = "fsdp2") -> float:
    return term(
        ss.predict(MODEL, CLUSTER, layout, software=software), "time", "gradients and gathered parameters"
    )


def test_gradients_are_reduced_once_however_many_micro_batches() -> None:
    more = LAYOUT.replace(global_batch=128)
    assert exposed(more) == pytest.approx(exposed(LAYOUT), rel=1e-6)
    alone = {"pipeline": 1, "data": 16}
    assert exposed(more.replace(**alone)) > 1.8 * exposed(LAYOUT.replace(**alone))


def test_gradients_are_whole_and_in_float32() -> None:
    pipelined, plain = (
        ss.predict(MODEL, CLUSTER, layout, software="fsdp2")
        for layout in (LAYOUT, LAYOUT.replace(pipeline=1, data=16))
    )
    weights, gradients = (term(pipelined, "memory", name) for name in ("weights", "gradients"))
    assert gradients == pytest.approx(LAYOUT.data * weights)  # of which each rank has a shard, in float32 too
    assert term(plain, "memory", "gradients") < 0.1 * gradients


@pytest.mark.parametrize("zero", [2, 3])
def test_the_simulation_agrees(zero: int) -> None:
    layout = LAYOUT.replace(zero=zero)
    predicted = ss.predict(MODEL, CLUSTER, layout, software="fsdp2").step_time_s
    simulated = ss.simulate(MODEL, CLUSTER, layout, software="fsdp2").step_time_s
    assert simulated == pytest.approx(predicted, rel=0.03)
