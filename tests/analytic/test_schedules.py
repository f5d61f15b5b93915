"""The tables against torch's own, against the papers' figures, and against what any schedule must keep."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardscope.analytic.schedules import ScheduledOp, ScheduleTable, Transfers, build
from shardscope.errors import SpecError
from shardscope.spec.layout import schedule_names
from shardscope.spec.pipeline_schedule import PipelineSchedule

CASES = [(name, stages, count) for name in schedule_names() for stages in (2, 4) for count in (8, 12)]
CASES += [("zero-bubble", 3, 8), ("interleaved", 3, 8), ("zbv", 3, 2), ("dualpipev", 3, 6), ("gpipe", 5, 2)]
TORCHS = [case for case in CASES if case[0] == "dualpipev" or PipelineSchedule(case[0]).torch_class]
EQUAL = {"F": 1.0, "B": 2.0, "I": 1.0, "W": 1.0}
ANY = settings(max_examples=60, deadline=None)


@st.composite
def tables(draw: st.DrawFn, names: tuple[str, ...] = schedule_names()) -> tuple[str, int, int, ScheduleTable]:
    """Any schedule with up to 8 ranks and 32 micro-batches that it accepts."""
    name, stages = draw(st.sampled_from(names)), draw(st.integers(1, 8))
    schedule = PipelineSchedule(name)
    allowed = [count for count in range(1, 33) if schedule.accepts(count, stages)]
    count = draw(st.sampled_from(allowed))
    held = draw(st.integers(schedule.least_stages, schedule.most_stages or 4))
    return name, stages, count, build(name, stages, count, held)


def durations() -> st.SearchStrategy[dict[str, float]]:
    return st.fixed_dictionaries({kind: st.floats(0.1, 4) for kind in "FIW"})


def order_by_torch(name: str, ranks: int, microbatches: int, held: int) -> list[list[ScheduledOp]]:
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


def _ops(action: object) -> list[ScheduledOp]:
    if action is None or action.computation_type.value == "REDUCE_GRAD":  # type: ignore[attr-defined]
        return []
    if action.sub_actions:  # type: ignore[attr-defined]
        return [op for sub in action.sub_actions for op in _ops(sub)]  # type: ignore[attr-defined]
    return [ScheduledOp(action.computation_type.value, action.stage_index, action.microbatch_index)]  # type: ignore[attr-defined]


@pytest.mark.parametrize(("name", "stages", "microbatches"), TORCHS)
def test_equals_torchs_own_order(name: str, stages: int, microbatches: int) -> None:
    table = build(name, stages, microbatches)
    held = table.num_stages // stages
    ours, theirs = [list(row) for row in table.ranks], order_by_torch(name, stages, microbatches, held)
    if (
        name == "1f1b"
    ):  # torch's listing miscounts the forwards of the last rank; what it runs is held against ours too
        ours, theirs = ours[:-1], theirs[:-1]
    assert ours == theirs


def test_zb_h1_costs_what_torchs_zero_bubble_costs_with_one_stage_a_rank() -> None:
    for stages, count in ((2, 4), (4, 8), (4, 12), (8, 32)):
        ours, torchs = build("zb-h1", stages, count), build("zero-bubble", stages, count, 1)
        assert ours.timeline(EQUAL).idle == torchs.timeline(EQUAL).idle
        assert ours.peak_activation() == torchs.peak_activation()


@ANY
@given(tables())
def test_every_stage_does_everything_once_and_nothing_before_what_it_needs(
    case: tuple[str, int, int, ScheduleTable],
) -> None:
    name, stages, microbatches, table = case
    end, last = {}, table.num_stages - 1
    for row in table.timed(EQUAL):
        for (kind, stage, batch), _, over in row:
            assert (kind, stage, batch) not in end
            end[kind, stage, batch] = over
    assert {(stage, batch) for _, stage, batch in end} == {
        (s, b) for s in range(table.num_stages) for b in range(microbatches)
    }
    for rank, row in enumerate(table.timed(EQUAL)):
        clock = 0.0
        for (kind, stage, batch), start, over in row:
            assert table.stage_ranks[stage] == rank
            assert start >= clock
            clock = over
            if kind == "F":
                needs = [("F", stage - 1)] if stage else []
            elif kind == "W":
                needs = [("I", stage)]
            else:
                needs = [("F", stage)] + ([(kind, stage + 1)] if stage < last else [])
            for need in needs:
                key = (*need, batch)
                assert start >= end.get(key, end.get(("B" if need[0] == "I" else "I", need[1], batch), 1e9))
    kinds = {kind for kind, _, _ in end}
    assert kinds <= set("FBIW")
    assert ("I" in kinds) <= PipelineSchedule(name).splits_backward
    assert all(1 <= peak <= microbatches for peak in table.peak_in_flight)
    assert 0 <= table.bubble_fraction < 1
    assert len(table.ranks) == stages


def test_no_schedule_deadlocks_with_up_to_8_ranks_and_32_micro_batches() -> None:
    for name in schedule_names():
        for stages in range(1, 9):
            for count in (1, 2, stages, stages + 1, 2 * stages, 31, 32):
                if PipelineSchedule(name).accepts(count, stages):
                    assert len(build(name, stages, count).order.sequence) == len(
                        build(name, stages, count).ops
                    )


@ANY
@given(tables(), durations(), st.floats(0, 3))
def test_the_times_are_the_least_that_any_order_of_looking_finds(
    case: tuple[str, int, int, ScheduleTable], costs: dict[str, float], send: float
) -> None:
    """A second, plain way to the same times: raise every start until nothing is violated any more."""
    table = case[3]
    costs = costs | {"B": costs["I"] + costs["W"]}
    where = table.stage_ranks
    start = dict.fromkeys(table.ops, 0.0)
    made = {("F" if op.op == "F" else "G", op.stage, op.microbatch): op for op in table.ops if op.op != "W"}
    after: list[tuple[ScheduledOp, ScheduledOp, float]] = []
    for row in table.ranks:
        after += [(a, b, 0.0) for a, b in pairwise(row)]
    for op in table.ops:
        other = op.stage - 1 if op.op == "F" else op.stage + 1
        if op.op != "W" and 0 <= other < table.num_stages:
            delay = send if where[other] != where[op.stage] else 0.0
            after.append((made["F" if op.op == "F" else "G", other, op.microbatch], op, delay))
    moved = True
    while moved:
        moved = False
        for a, b, delay in after:
            least = start[a] + costs[a.op] + delay
            if start[b] < least - 1e-9:
                start[b], moved = least, True
    for row in table.timed(costs, send=send):
        for op, begin, end in row:
            assert begin == pytest.approx(start[op], abs=1e-6)
            assert end - begin == pytest.approx(costs[op.op])


@ANY
@given(tables(), durations())
def test_slower_stages_and_slower_links_never_make_a_step_faster(
    case: tuple[str, int, int, ScheduleTable], costs: dict[str, float]
) -> None:
    table = case[3]
    plain = table.timeline(costs)
    uneven = table.timeline(costs, stage_cost=[1.0 + 0.3 * (stage % 3) for stage in range(table.num_stages)])
    assert uneven.end >= plain.end - 1e-9
    assert table.timeline(costs, send=0.5).end >= plain.end - 1e-9


def test_memory_never_exceeds_that_of_the_schedule_it_improves_on() -> None:
    for stages in range(1, 9):
        for count in {stages, stages + 1, 2 * stages - 1, 2 * stages, 32}:
            peak = {
                name: max(build(name, stages, count).peak_activation())
                for name in ("gpipe", "1f1b", "zb-h1", "zb-h2", "zbv", "v-half", "v-min")
            }
            assert peak["1f1b"] <= peak["gpipe"]
            assert peak["zb-h1"] <= peak["1f1b"]
            assert peak["zb-h2"] <= 2 * peak["1f1b"]
            assert peak["zbv"] <= peak["1f1b"]
            assert peak["v-min"] <= peak["v-half"] <= peak["1f1b"]


def test_bubbles_come_in_the_order_of_the_papers() -> None:
    for stages in range(2, 9):
        idle = {name: max(build(name, stages, 4 * stages).timeline(EQUAL).idle) for name in schedule_names()}
        whole = {name: value / PipelineSchedule(name).default_stages for name, value in idle.items()}
        assert whole["zb-h2"] == whole["zbv"] == 0
        assert whole["zb-h1"] < whole["1f1b"] == whole["gpipe"]
        assert whole["zero-bubble"] < whole["interleaved"] < whole["1f1b"]
        assert whole["v-half"] <= whole["v-min"] < whole["1f1b"]
        assert whole["dualpipev"] <= whole["v-half"]


PUBLISHED = {
    "1f1b": (1, 1),
    "zb-h1": (1 / 3, 1),
    "zb-h2": (0, 2),
    "zbv": (0, 1),
    "v-half": (1 / 2, 1 / 2),
    "v-min": (2 / 3, 1 / 3),
}
"""Bubble and activations as parts of 1F1B's for T_F = T_B = T_W: the table of sail-sg/zero-bubble's README."""


@pytest.mark.parametrize(("name", "bubble", "memory"), [(name, *both) for name, both in PUBLISHED.items()])
def test_the_authors_own_table_comes_out_up_to_what_it_rounds_away(
    name: str, bubble: float, memory: float
) -> None:
    for stages in (8, 16, 24):
        table, base = build(name, stages, 4 * stages), build("1f1b", stages, 4 * stages)
        held = table.num_stages // stages
        idle = max(table.timeline(EQUAL).idle) / held / max(base.timeline(EQUAL).idle)
        assert idle == pytest.approx(bubble, abs=1 / (stages - 1) / 2)
        part = max(table.peak_activation()) / max(base.peak_activation())
        assert part == pytest.approx(memory, abs=1.5 / stages)


@pytest.mark.parametrize(("stages", "microbatches"), [(2, 8), (4, 8), (8, 32)])
def test_gpipe_and_1f1b_have_the_textbooks_bubble(stages: int, microbatches: int) -> None:
    expected = (stages - 1) / (microbatches + stages - 1)
    assert build("gpipe", stages, microbatches).bubble_fraction == pytest.approx(expected)
    assert build("1f1b", stages, microbatches).bubble_fraction == pytest.approx(expected)


def test_gpipe_holds_everything_and_1f1b_what_is_ahead_of_it() -> None:
    assert build("gpipe", 4, 8).peak_in_flight == (8, 8, 8, 8)
    assert build("1f1b", 4, 8).peak_in_flight == (4, 3, 2, 1)
    assert build("interleaved", 4, 8).peak_activation() == (5.5, 4.5, 3.5, 2.5)


def test_what_the_inputs_pass_frees_is_not_held_for_the_weights() -> None:
    table = build("zb-h2", 4, 8)
    assert table.peak_activation() == (7, 7, 7, 7)
    assert table.peak_activation(freed_by_input=0.5) == (7, 6, 5, 4)
    assert build("1f1b", 4, 8).peak_activation(freed_by_input=0.5) == (4, 3, 2, 1)


def test_interleaving_and_splitting_the_backward_shrink_the_bubble() -> None:
    bubbles = [build(name, 4, 16).bubble_fraction for name in ("1f1b", "interleaved", "zero-bubble", "zbv")]
    assert bubbles == sorted(bubbles, reverse=True)
    plain = (
        3 / 16
    )  # as a share of the work; with v stages a rank a v-th of it (Narayanan et al. 2021, section 2.2)
    share = build("interleaved", 4, 16, 2).bubble_fraction
    assert share / (1 - share) == pytest.approx(plain / 2)


def test_zbv_has_no_bubble_but_the_ramp_where_all_parts_take_equally_long() -> None:
    timeline = build("zbv", 4, 12).timeline()
    work = 6 * 12  # F, I and W of two stages
    assert timeline.busy == (work,) * 4
    assert timeline.idle == (0,) * 4
    assert timeline.step_time == work
    assert timeline.end == work + 3


def test_sending_takes_time_between_ranks_but_not_within_one() -> None:
    assert build("1f1b", 2, 2).timeline({"F": 1, "B": 2}, send=0.25).end == 9.5
    assert build("zbv", 1, 2).timeline(EQUAL, send=5).end == build("zbv", 1, 2).timeline(EQUAL).end


def test_a_schedule_that_waits_for_itself_is_found_out() -> None:
    for ops in (
        [ScheduledOp("B", 0, 0), ScheduledOp("F", 0, 0)],
        [ScheduledOp("F", 0, 0), ScheduledOp("W", 0, 0), ScheduledOp("I", 0, 0)],
    ):
        with pytest.raises(SpecError, match="deadlocks"):
            ScheduleTable((tuple(ops),), (0,)).timed()
    crossed = ScheduleTable(
        (
            (ScheduledOp("F", 0, 0), ScheduledOp("F", 0, 1), ScheduledOp("B", 0, 1), ScheduledOp("B", 0, 0)),
            (ScheduledOp("F", 1, 0), ScheduledOp("B", 1, 0), ScheduledOp("F", 1, 1), ScheduledOp("B", 1, 1)),
        ),
        (0, 1),
    )
    assert crossed.timeline().end > 0
    missing = ScheduleTable(
        ((ScheduledOp("F", 0, 0), ScheduledOp("B", 0, 0)), (ScheduledOp("F", 1, 0),)), (0, 1)
    )
    with pytest.raises(SpecError, match="deadlocks"):
        missing.timed()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("1f2b", 4, 8), "did you mean '1f1b'"),
        (("1f1b", 4, 3), "the 1f1b schedule on 4 ranks needs at least 4"),
        (("dualpipev", 4, 7), "needs at least 8"),
        (("interleaved", 4, 9), "in rounds of equal size"),
        (("gpipe", 4, 8, 2), "needs exactly 1 stage per rank"),
        (("zbv", 4, 8, 3), "needs exactly 2 stages per rank"),
        (("v-min", 4, 8, 1), "needs exactly 2 stages per rank"),
        (("zb-h1", 0, 8), "stages=0 is too few; a pipeline needs at least 1"),
        (("v-half", 4, 0), "microbatches=0 is too few; a pipeline needs at least 1"),
        (("1f1b", 4, 2**31), "more than 4,194,304 passes, .* use at most 524288 micro-batches"),
        (("interleaved", 7, 10_000_000, 3), "use at most 99862 micro-batches"),
        (("1f1b", 3_000_000, 10), "too much memory; use fewer stages"),
    ],
)
def test_impossible_schedules_are_refused(arguments: tuple, message: str) -> None:
    with pytest.raises(SpecError, match=message):
        build(*arguments)


@pytest.mark.parametrize(
    ("settings_", "message"),
    [
        ({"durations": {"F": -1, "B": 2}}, "F=-1"),
        ({"send": -0.1}, "send=-0.1"),
        ({"send": float("nan")}, "send=nan"),
        ({"stage_cost": [1.0, -2.0]}, "stage_cost=-2.0"),
        ({"stage_cost": [1.0]}, "has length 1, but the pipeline has 2 stages"),
    ],
)
def test_impossible_times_are_refused(settings_: dict, message: str) -> None:
    with pytest.raises(SpecError, match=message):
        build("1f1b", 2, 4).timeline(**settings_)


@pytest.mark.parametrize(
    ("blocks", "starts", "end"),
    [(True, [0, 1, 6, 10, 2, 3, 6, 7], 12), (False, [0, 1, 6, 9, 2, 3, 5, 6], 11)],
)
def test_messages_start_when_they_are_received_and_ranks_may_wait_for_those_they_sent(
    blocks: bool, starts: list[float], end: float
) -> None:
    """Two ranks, worked out by hand: F0 F1 B0 B1 and F0 B0 F1 B1, with forward, backward and message of 1, 2 and 1."""
    table = replace(build("1f1b", 2, 2), blocks=blocks)
    assert build("1f1b", 2, 2).blocks
    assert not build("zb-h1", 2, 2).blocks
    costs = [{"F": 1.0, "B": 2.0}[op.op] for op in table.ops]
    line = Transfers.of(table).timeline(costs, [1.0] * len(costs))
    assert list(line.starts) == starts
    assert line.end == end


@pytest.mark.parametrize("schedule", [name for name in schedule_names() if not PipelineSchedule(name).blocks])
def test_receives_are_posted_where_torch_posts_them(schedule: str) -> None:
    """The receive of each result follows the same pass as in the list that torch's runtime executes."""
    from torch.distributed.pipelining.schedules import _Action, _add_send_recv

    from shardscope.training._compat_pipelining import _KINDS

    table = build(schedule, 4, 8)
    places = {(op.op, op.stage, op.microbatch): i for i, op in enumerate(table.ops)}
    letters = {kind: letter for letter, kind in _KINDS.items()}
    lists = _add_send_recv(
        {rank: [_Action(op.stage, _KINDS[op.op], op.microbatch) for op in row] for rank, row in enumerate(table.ranks)},
        stage_to_rank=table.stage_ranks.__getitem__, num_stages=table.num_stages,
    )  # fmt: skip
    transfers, found = Transfers.of(table), 0
    for row in lists.values():
        last = -1
        for action in row:
            kind, stage, batch = action.computation_type, action.stage_index, action.microbatch_index
            if kind in letters:
                last = places[letters[kind], stage, batch]
            elif kind.name.startswith("RECV"):
                sender, passes = (stage - 1, "F") if kind.name == "RECV_F" else (stage + 1, "BI")
                source = next(places[x, sender, batch] for x in passes if (x, sender, batch) in places)
                assert set(transfers.after[len(table.ops) + source]) == {source, last} - {-1}
                found += 1
    assert found == sum(target >= 0 for target in transfers.targets)
