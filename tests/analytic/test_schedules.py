"""The tables against torch's own, against the papers' figures, and against what any schedule must keep."""

from __future__ import annotations

import pytest

from shardscope.analytic.schedules import SCHEDULES, Op, Table, build
from shardscope.errors import SpecError

CASES = [(name, stages, count) for name in SCHEDULES for stages in (2, 4) for count in (8, 12)]
CASES += [("zero-bubble", 3, 8), ("interleaved", 3, 8), ("zbv", 3, 2), ("dualpipev", 3, 6), ("gpipe", 5, 2)]


def order_by_torch(name: str, ranks: int, microbatches: int, held: int) -> list[list[Op]]:
    from torch.distributed.pipelining import _schedule_visualizer, schedules

    cls = {
        "gpipe": schedules.ScheduleGPipe,
        "1f1b": schedules.Schedule1F1B,
        "interleaved": schedules.ScheduleInterleaved1F1B,
        "zero-bubble": schedules.ScheduleInterleavedZeroBubble,
        "zbv": schedules.ScheduleZBVZeroBubble,
        "dualpipev": schedules.ScheduleDualPipeV,
    }[name]
    rows = _schedule_visualizer.get_schedule_ops(cls, ranks, microbatches, held)
    return [[op for action in row for op in _ops(action)] for row in rows]


def _ops(action: object) -> list[Op]:
    if action is None or action.computation_type.value == "REDUCE_GRAD":  # type: ignore[attr-defined]
        return []
    if action.sub_actions:  # type: ignore[attr-defined]
        return [op for sub in action.sub_actions for op in _ops(sub)]  # type: ignore[attr-defined]
    return [Op(action.computation_type.value, action.stage_index, action.microbatch_index)]  # type: ignore[attr-defined]


@pytest.mark.parametrize(("name", "stages", "microbatches"), CASES)
def test_equals_torchs_own_order(name: str, stages: int, microbatches: int) -> None:
    table = build(name, stages, microbatches)
    held = table.num_stages // stages
    ours, theirs = [list(row) for row in table.ranks], order_by_torch(name, stages, microbatches, held)
    if (
        name == "1f1b"
    ):  # torch's listing miscounts the forwards of the last rank; what it runs is held against ours too
        ours, theirs = ours[:-1], theirs[:-1]
    assert ours == theirs


@pytest.mark.parametrize(("name", "stages", "microbatches"), CASES)
def test_every_stage_does_everything_once_and_nobody_waits_forever(
    name: str, stages: int, microbatches: int
) -> None:
    table = build(name, stages, microbatches)
    done = [op for row in table.ranks for op in row]
    assert len(done) == len(set(done))
    for stage in range(table.num_stages):
        for batch in range(microbatches):
            kinds = {op.op for op in done if (op.stage, op.microbatch) == (stage, batch)}
            assert kinds in ({"F", "B"}, {"F", "I", "W"})
    assert all(table.stage_ranks[op.stage] == rank for rank, row in enumerate(table.ranks) for op in row)
    assert 0 <= table.bubble_fraction < 1
    assert all(1 <= peak <= microbatches for peak in table.peak_in_flight)


@pytest.mark.parametrize(("stages", "microbatches"), [(2, 8), (4, 8), (8, 32)])
def test_gpipe_and_1f1b_have_the_textbooks_bubble(stages: int, microbatches: int) -> None:
    expected = (stages - 1) / (microbatches + stages - 1)
    assert build("gpipe", stages, microbatches).bubble_fraction == pytest.approx(expected)
    assert build("1f1b", stages, microbatches).bubble_fraction == pytest.approx(expected)


def test_gpipe_holds_everything_and_1f1b_what_is_ahead_of_it() -> None:
    assert build("gpipe", 4, 8).peak_in_flight == (8, 8, 8, 8)
    assert build("1f1b", 4, 8).peak_in_flight == (4, 3, 2, 1)


def test_interleaving_and_splitting_the_backward_shrink_the_bubble() -> None:
    bubbles = [build(name, 4, 16).bubble_fraction for name in ("1f1b", "interleaved", "zero-bubble", "zbv")]
    assert bubbles == sorted(bubbles, reverse=True)
    plain = (
        3 / 16
    )  # as a share of the work; with v stages a rank a v-th of it (Narayanan et al. 2021, section 2.2)
    share = build("interleaved", 4, 16, 2).bubble_fraction
    assert share / (1 - share) == pytest.approx(plain / 2)


def test_zbv_has_no_bubble_but_the_ramp_where_all_parts_take_equally_long() -> None:
    rows = build("zbv", 4, 12).timed()
    work = 6 * 12  # F, I and W of two stages
    ends = [row[-1].end - row[0].start for row in rows]
    assert ends == [work] * 4


def test_a_schedule_that_waits_for_itself_is_found_out() -> None:
    table = Table(((Op("B", 0, 0), Op("F", 0, 0)),), (0,))
    with pytest.raises(ValueError, match="deadlocks"):
        table.timed()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("1f2b", 4, 8), "did you mean '1f1b'"),
        (("1f1b", 4, 3), "the 1f1b schedule on 4 ranks needs at least 4"),
        (("dualpipev", 4, 7), "needs at least 8"),
        (("interleaved", 4, 9), "in rounds of equal size"),
        (("gpipe", 4, 8, 2), "has exactly 1 stages a rank"),
        (("zbv", 4, 8, 3), "has exactly 2 stages a rank"),
    ],
)
def test_impossible_schedules_are_refused(arguments: tuple, message: str) -> None:
    with pytest.raises(SpecError, match=message):
        build(*arguments)
