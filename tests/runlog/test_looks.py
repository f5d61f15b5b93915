"""Looks at layers kept in bounded memory, and what alarms are still found in them."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import pairwise
from typing import Any

import pytest

from shardscope.runlog import layers as module
from shardscope.runlog.layers import LayerSamples, layers_of
from shardscope.spec import Optimizer

LAMB = Optimizer("lamb")


def look(
    step: int, rank: int = 0, ratio: Any = 1.0, residuals: Any = 1.0, is_zero: bool = False
) -> dict[str, Any]:
    norms = (
        {"weight_norm": [0.0], "update_norm": [1.0]}
        if is_zero
        else {"weight_norm": [1.0], "update_norm": [None]}
    )
    rows = {"layer": ["a"], "ratio": [ratio], **norms, "bound": [None]}
    told = rows if rank == 0 else {name: [] for name in rows}
    return {
        "event": "layers", "step": step, "rank": rank, "lr": 0.1, **told,
        "owed": [["residual", "a", residuals, 1.0]],
    }  # fmt: skip


def looks_of(events: Iterable[dict[str, Any]]) -> LayerSamples:
    layer_samples = LayerSamples()
    for event in events:
        layer_samples.take(event)
    return layer_samples


def steps_of(layer_samples: LayerSamples) -> tuple[int, ...]:
    return layer_samples.layers(LAMB).ratios[0].steps


def test_few_looks_are_all_kept_whoever_comes_first() -> None:
    events = [look(step, rank) for step in (1, 10, 20) for rank in (1, 0)]
    assert looks_of(events).layers(LAMB) == layers_of(events, LAMB)
    assert LayerSamples().layers(LAMB) == layers_of([], LAMB)


@pytest.mark.parametrize("num_samples", [240, 241, 242, 479, 480, 481, 5000])
def test_many_are_thinned_evenly_and_the_first_and_the_newest_stay(num_samples: int) -> None:
    layer_samples = looks_of(look(10 * n, rank) for n in range(1, num_samples + 1) for rank in (0, 1))
    steps = steps_of(layer_samples)
    assert (steps[0], steps[-1]) == (10, 10 * num_samples)
    assert module.MOST_SAMPLES / 2 <= len(steps) <= module.MOST_SAMPLES
    assert len({after - before for before, after in pairwise(steps[:-1])}) == 1
    assert (layer_samples.num_samples, layer_samples.num_events) == (num_samples, 2 * num_samples)
    assert len(layer_samples.layers(LAMB).residuals[0].steps) == len(steps)


@pytest.mark.parametrize("fields", [{"ratio": "nan"}, {"residuals": "inf"}])
def test_the_first_that_is_no_number_stays_though_all_after_it_are_well(fields: dict[str, Any]) -> None:
    layer_samples = looks_of(look(step, **(fields if step == 7 else {})) for step in range(1, 2001))
    assert [alarm.kind for alarm in layer_samples.layers(LAMB).alarms] == ["not finite"]


def test_a_rank_that_comes_late_to_a_look_left_out_is_passed_over() -> None:
    layer_samples = looks_of(look(step) for step in range(1, 1001))
    kept = steps_of(layer_samples)
    layer_samples.take(look(2, rank=1))
    assert steps_of(layer_samples) == kept


def test_a_step_of_a_layer_of_zeros_is_found_however_many_samples_there_are() -> None:
    events = [look(step, is_zero=step == 7) for step in range(1, 2001)]
    alarms = looks_of(events).layers(LAMB).alarms
    assert [alarm.kind for alarm in alarms] == ["bare step"]
    assert layers_of(events, LAMB).alarms == alarms
