"""Loads of experts in the run log: sums over ranks, figures of a step, and what is not a load."""

from __future__ import annotations

from typing import Any

import pytest

from shardscope.runlog.experts import ExpertLog, imbalance_of
from shardscope.runlog.reducer import RunLog
from shardscope.runlog.schema import is_readable
from shardscope.runlog.summary import summarise


def event(rank: int = 0, step: int = 1, **fields: Any) -> dict[str, Any]:
    loads = {"assigned": [[6, 2], [4, 4]], "dropped": [[2, 0], [0, 0]]}
    return {
        "event": "experts", "rank": rank, "t": 1.0, "step": step, "layers": ["a", "b"], "sequences": 2,
        "balances": [3.0, 2.0], **loads, **fields,
    }  # fmt: skip


def test_loads_of_a_step_are_the_sums_over_ranks() -> None:
    log = RunLog(world_size=2)
    log.feed([event(), event(1, assigned=[[2, 6], [8, 0]], dropped=[[0, 0], [4, 0]], balances=[2.0, 4.0])])
    loads = log.experts.newest[1]
    assert loads.assigned == ((8, 8), (12, 4))
    assert loads.dropped == ((2, 0), (4, 0))
    assert log.experts.figures[1] == pytest.approx((1.25, 6 / 32, (5.0 + 6.0) / 2 / 4))
    summary = summarise(log, "running")
    assert (summary.expert_imbalance, summary.dropped_tokens) == (1.25, 6 / 32)


def test_a_model_without_experts_has_no_such_figures() -> None:
    summary = summarise(RunLog(world_size=1), "running")
    assert (summary.expert_imbalance, summary.dropped_tokens) == (None, None)


def test_a_restart_discards_the_steps_that_it_repeats() -> None:
    log = ExpertLog()
    for step in (1, 2, 3):
        log.take(event(step=step))
    log.rewind(1)
    assert [*log.figures] == [*log.newest] == [1]


def test_only_the_newest_steps_keep_every_load() -> None:
    log = ExpertLog()
    for step in range(1, 101):
        log.take(event(step=step))
    assert len(log.figures) == 100
    assert max(log.newest) == 100
    assert len(log.newest) < 100
    log.take(event(1, step=1))  # too late to be added
    assert 1 not in log.newest


@pytest.mark.parametrize(
    "wrong",
    [
        {"assigned": [[6, 2]]}, {"dropped": [[1], [2, 3]]}, {"layers": ["a"]}, {"balances": []}, {"assigned": [[], []]},
        {"assigned": [[-1, 2], [4, 4]]}, {"sequences": None},
        {"layers": [], "assigned": [], "dropped": [], "balances": []},
    ],
)  # fmt: skip
def test_an_event_with_other_shapes_is_dropped(wrong: dict[str, Any]) -> None:
    assert is_readable(event())
    assert not is_readable(event(**wrong))


def test_an_even_load_and_no_load_have_an_imbalance_of_one() -> None:
    assert imbalance_of([3, 3, 3]) == imbalance_of([0, 0]) == 1.0
    assert imbalance_of([8, 0, 0, 0]) == 4.0
