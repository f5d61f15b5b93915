"""Looks at layers kept in bounded memory, and what alarms are still found in them."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import pairwise
from typing import Any

import pytest

from shardscope.runlog import layers as module
from shardscope.runlog.layers import Looks, layers_of
from shardscope.spec import Optimizer

LAMB = Optimizer("lamb")


def look(step: int, rank: int = 0, ratio: Any = 1.0, owed: Any = 1.0) -> dict[str, Any]:
    rows = {"layer": ["a"], "ratio": [ratio], "weight_norm": [1.0], "update_norm": [None], "bound": [None]}
    told = rows if rank == 0 else {name: [] for name in rows}
    return {
        "event": "layers", "step": step, "rank": rank, "lr": 0.1, **told,
        "owed": [["residual", "a", owed, 1.0]],
    }  # fmt: skip


def looks_of(events: Iterable[dict[str, Any]]) -> Looks:
    looks = Looks()
    for event in events:
        looks.take(event)
    return looks


def steps_of(looks: Looks) -> tuple[int, ...]:
    return looks.layers(LAMB).ratios[0].steps


def test_few_looks_are_all_kept_whoever_comes_first() -> None:
    events = [look(step, rank) for step in (1, 10, 20) for rank in (1, 0)]
    assert looks_of(events).layers(LAMB) == layers_of(events, LAMB)
    assert Looks().layers(LAMB) == layers_of([], LAMB)


@pytest.mark.parametrize("num_looks", [240, 241, 242, 479, 480, 481, 5000])
def test_many_are_thinned_evenly_and_the_first_and_the_newest_stay(num_looks: int) -> None:
    looks = looks_of(look(10 * n, rank) for n in range(1, num_looks + 1) for rank in (0, 1))
    steps = steps_of(looks)
    assert (steps[0], steps[-1]) == (10, 10 * num_looks)
    assert module.MOST_LOOKS / 2 <= len(steps) <= module.MOST_LOOKS
    assert len({after - before for before, after in pairwise(steps[:-1])}) == 1
    assert (looks.num_looks, looks.num_events) == (num_looks, 2 * num_looks)
    assert len(looks.layers(LAMB).owed[0].steps) == len(steps)


@pytest.mark.parametrize("fields", [{"ratio": "nan"}, {"owed": "inf"}])
def test_the_first_that_is_no_number_stays_though_all_after_it_are_well(fields: dict[str, Any]) -> None:
    looks = looks_of(look(step, **(fields if step == 7 else {})) for step in range(1, 2001))
    assert [alarm.kind for alarm in looks.layers(LAMB).alarms] == ["not finite"]


def test_a_rank_that_comes_late_to_a_look_left_out_is_passed_over() -> None:
    looks = looks_of(look(step) for step in range(1, 1001))
    kept = steps_of(looks)
    looks.take(look(2, rank=1))
    assert steps_of(looks) == kept
