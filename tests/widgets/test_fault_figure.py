"""The timeline of faults: which steps were lost, when ranks trained again, and what it says."""

from __future__ import annotations

import pytest

from conformance.events import step_event
from shardscope_widgets.figures import _faults, _faults_plot
from shardscope_widgets.figures._faults import DETECTION, LOST, RESIZE, RESTART, START, TRAINING
from shardscope_widgets.figures._faults_plot import faults_parts
from shardscope_widgets.trace import Trace

RANKS = (0, 1)


def started(t, ranks=RANKS):
    """Processes that begin at `t`, and are ready to train 0.2 s later."""
    begun = [{"event": "process", "rank": rank, "t": t, "pid": 100 + rank} for rank in ranks]
    ready = {"event": "start", "t": t + 0.2, "strategy": "ring", "world_size": len(ranks)}
    return [*begun, *({**ready, "rank": rank} for rank in ranks)]


def resume(rank, t, step):
    return {"event": "resume", "rank": rank, "t": t, "step": step, "samples": 4 * step, "notes": []}


def steps(first, last, start, *, ranks=RANKS):
    """Steps of 0.1 s, the first of which starts at `start`."""
    return [
        step_event(step, rank, t=start + 0.1 * (step - first + 1))
        for step in range(first, last + 1)
        for rank in ranks
    ]


def kill(rank, t, step, number=0):
    return {
        "event": "fault", "rank": rank, "t": t, "step": step, "kind": "kill", "number": number,
        "text": f"rank {rank} killed before step {step}",
    }  # fmt: skip


def restart(t, step, failed_step, *, attempt=1, rank=1, failed_t=None):
    return {
        "event": "restart", "rank": 0, "t": t, "attempt": attempt, "cause": f"rank {rank} was killed",
        "failed_rank": rank, "failed_step": failed_step, "step": step, "source": "disk" if step else "start",
        "failed_t": t if failed_t is None else failed_t,
    }  # fmt: skip


def broken(*more):
    """Seven steps from second 1 on; rank 1 is killed before step 8, and all continue from step 5 at second 3."""
    return [
        *started(0.0), *steps(1, 7, 1.0), kill(1, 1.75, 8),
        restart(1.9, 5, 7, failed_t=1.85), *started(2.0),
        *(resume(rank, 2.5, 5) for rank in RANKS), *steps(6, 10, 3.0), *more,
    ]  # fmt: skip


def grown(*more):
    """Five steps of two ranks from second 1 on, and five of three ranks from second 2.5 on."""
    three = (0, 1, 2)
    return [*started(0.0), *steps(1, 5, 1.0), *started(1.8, three), *steps(6, 10, 2.5, ranks=three), *more]


def info_of(events):
    trace = Trace("id", "a run", "ring", world_size=2)
    for event in events:
        trace.feed([event])  # one by one, as a lab receives them
    return _faults.faults_info(trace)


def bars_of(info, rank):
    return [
        (bar.kind, round(bar.start_s, 3), round(bar.end_s, 3), bar.first_step, bar.last_step)
        for bar in info.bars
        if bar.rank == rank
    ]


class TestInfo:
    def test_a_rank_trains_loses_waits_and_starts_again(self):
        info = info_of(broken())
        assert bars_of(info, 0) == [
            (START, 0.0, 1.0, 0, 0), (TRAINING, 1.0, 1.5, 1, 5), (LOST, 1.5, 1.75, 6, 7), (DETECTION, 1.75, 1.85, 0, 0),
            (RESTART, 1.85, 3.0, 0, 0), (TRAINING, 3.0, 3.5, 6, 10),
        ]  # fmt: skip

    def test_the_incident_says_who_when_and_how_much(self):
        (incident,) = info_of(broken()).incidents
        assert (incident.rank, incident.last_step, incident.resumed, incident.num_lost) == (1, 7, 5, 2)
        assert (incident.failed_s, incident.detected_s, incident.again_s) == pytest.approx((1.75, 1.85, 3.0))

    def test_lines_of_progress_end_where_steps_were_lost(self):
        first, second = info_of(broken()).progress
        assert (first.steps[0], first.steps[-1], first.kept) == (0, 7, 5)
        assert (second.steps[0], second.steps[-1], second.kept) == (5, 10, 10)
        assert first.times_s[-1] == pytest.approx(1.7)

    def test_until_ranks_train_again_the_incident_is_open(self):
        info = info_of(broken()[: 4 + 14 + 2])
        assert info.incidents[0].again_s is None
        assert info.bars[-1].kind == DETECTION
        assert "are restarting" in _faults.faults_text(info)

    def test_a_second_failure_further_back_takes_steps_that_seemed_safe(self):
        again = [
            kill(1, 3.55, 11, 1), restart(3.7, 0, 10, attempt=2), *started(3.8),
            *steps(1, 12, 5.0),
        ]  # fmt: skip
        info = info_of(broken(*again))
        kinds = [kind for kind, *_ in bars_of(info, 1)]
        assert kinds == [START, LOST, DETECTION, RESTART, LOST, DETECTION, RESTART, TRAINING]
        assert [each.resumed for each in info.incidents] == [5, 0]

    def test_without_faults_there_is_only_training(self):
        info = info_of([*started(0.0), *steps(1, 5, 1.0)])
        assert [kind for kind, *_ in bars_of(info, 0)] == [START, TRAINING]
        assert info.incidents == ()
        assert "no rank has failed" in _faults.faults_text(info)

    def test_a_rank_that_vanished_without_a_word_failed_at_its_newest_event(self):
        info = info_of([event for event in broken() if event["event"] != "fault"])
        assert info.incidents[0].failed_s == pytest.approx(1.7)


class TestResizes:
    def test_steps_go_on_after_a_resize_with_a_pause_on_every_rank_after_it(self):
        info = info_of(grown())
        assert bars_of(info, 0) == [
            (START, 0.0, 1.0, 0, 0), (TRAINING, 1.0, 1.5, 1, 5), (RESIZE, 1.5, 2.5, 0, 0), (TRAINING, 2.5, 3.0, 6, 10),
        ]  # fmt: skip
        assert bars_of(info, 2) == [(RESIZE, 1.5, 2.5, 0, 0), (TRAINING, 2.5, 3.0, 6, 10)]
        assert [(line.steps[0], line.steps[-1], line.kept) for line in info.progress] == [
            (0, 5, 5),
            (5, 10, 10),
        ]
        assert info.progress[1].times_s[0] == 2.5
        assert info.incidents == ()

    def test_the_resize_is_told_timed_and_marked(self):
        info = info_of(grown())
        text = _faults.faults_text(info)
        assert "Resized from 2 to 3 ranks after step 5; training continued after 1 s." in text
        assert text.endswith("went into steps that did not have to be repeated; resizes 1 s.")
        assert [note.text for note in _faults_plot.draw_faults(info).layout.annotations] == ["3 ranks"]

    def test_its_note_is_above_the_line_of_its_pause_where_that_is_low(self):
        low = [
            *started(0.0),
            *steps(1, 2, 1.0),
            *started(1.3, (0, 1, 2)),
            *steps(3, 40, 2.5, ranks=(0, 1, 2)),
        ]
        (note,) = _faults_plot.draw_faults(info_of(low)).layout.annotations
        assert (note.yref, note.y, note.yanchor) == ("y2", 2, "bottom")
        (note,) = _faults_plot.draw_faults(info_of(grown())).layout.annotations
        assert (note.yref, note.y) == ("y2 domain", 0)

    def test_until_the_new_ranks_train_they_are_starting(self):
        info = info_of([event for event in grown() if event["t"] < 2.5])
        assert info.resizes[0].again_s is None
        assert "after step 5; the ranks are starting." in _faults.faults_text(info)

    def test_a_failure_after_a_resize_is_one_of_the_ranks_after_it(self):
        info = info_of(
            grown(restart(3.2, 8, 10), *started(3.3, (0, 1, 2)), *steps(9, 12, 4.0, ranks=(0, 1, 2)))
        )
        kinds = [kind for kind, *_ in bars_of(info, 1)]
        assert kinds == [START, TRAINING, RESIZE, TRAINING, LOST, DETECTION, RESTART, TRAINING]
        assert len(info.resizes) == len(info.incidents) == 1

    def test_a_failure_can_lose_steps_from_before_a_resize(self):
        info = info_of(
            grown(restart(3.2, 3, 10), *started(3.3, (0, 1, 2)), *steps(4, 6, 4.0, ranks=(0, 1, 2)))
        )
        assert bars_of(info, 0)[:4] == [
            (START, 0.0, 1.0, 0, 0), (TRAINING, 1.0, 1.3, 1, 3), (LOST, 1.3, 1.5, 4, 5), (RESIZE, 1.5, 2.5, 0, 0),
        ]  # fmt: skip
        assert [line.kept for line in info.progress] == [3, 3, 6]

    def test_times_and_words_are_right_when_a_resized_run_goes_on_with_fewer_ranks(self):
        info = info_of(grown(restart(3.1, 8, 10, failed_t=3.05), *started(3.2), *steps(9, 12, 4.0)))
        assert (info.incidents[0].before, info.incidents[0].after) == (3, 2)
        measured = [info.seconds(kind) for kind in (LOST, DETECTION, RESTART, RESIZE)]
        assert measured == pytest.approx([0.2, 0.05, 0.95, 1.0])
        text = _faults.faults_text(info)
        assert text.startswith("Resized from 2 to 3 ranks after step 5")
        assert "Rank 1 was killed, noticed after 50 ms; training continued on 2 ranks after 1 s" in text
        assert "lost work 200 ms, detection 50 ms, restarts 950 ms and resizes 1 s." in text

    def test_a_restart_that_fails_ends_at_its_failure(self):
        never = [restart(1.95, 5, 7, failed_t=1.9), *started(2.0)]
        again = [restart(2.6, 5, 5, attempt=2, failed_t=2.5), *started(2.7), *steps(6, 8, 3.5)]
        info = info_of([*started(0.0), *steps(1, 7, 1.0), *never, *again])
        assert [each.again_s for each in info.incidents] == [None, pytest.approx(3.5)]
        first_s = info.incidents[1].failed_s - 1.9
        assert info.seconds(RESTART) == pytest.approx(first_s + 1.0)

    def test_after_a_failure_and_then_a_resize_the_failure_has_ended_before_it(self):
        later = [*started(3.8, (0, 1, 2)), *steps(11, 12, 4.5, ranks=(0, 1, 2))]
        info = info_of(broken(*later))
        assert info.incidents[0].again_s == pytest.approx(3.0)
        assert [each[:3] for each in info.resizes] == [(2, 3, 10)]


class TestText:
    def test_it_names_the_rank_the_checkpoint_the_lost_steps_and_the_goodput(self):
        text = _faults.faults_text(info_of(broken()))
        assert text.startswith(
            "Rank 1 killed before step 8, noticed after 100 ms; training continued after 1.25 s"
        )
        assert "from the checkpoint of step 5 on disk, and 2 finished steps had to be repeated." in text
        assert (
            "1 s of the 3.3 s since the first rank was ready went into steps that did not have to be repeated; lost "
            "work 250 ms," in text
        )

    def test_many_failures_are_counted_and_the_last_ones_told(self):
        events, begin = [*started(0.0)], 1.0
        for number in range(5):
            events += [*steps(1, 3, begin), restart(begin + 0.5, 0, 3, attempt=number + 1)]
            events += started(begin + 0.6)
            begin += 1.0
        info = info_of([*events, *steps(1, 3, begin)])
        assert _faults.faults_text(info).startswith("5 failures")
        assert _faults.faults_text(info).count("was killed") == 3


class TestDrawing:
    def test_lost_work_failure_and_checkpoint_are_marked(self):
        figure = _faults_plot.draw_faults(info_of(broken()))
        named = {trace.name for trace in figure.data if trace.showlegend}
        assert named == {
            START, TRAINING, LOST, DETECTION, RESTART, "failure", "resumed from",
        }  # fmt: skip
        assert {note.text for note in figure.layout.annotations} == {"<b>rank 1 failed</b><br>2 steps lost"}

    def test_a_checkpoint_that_is_recorded_is_marked_where_it_was_complete(self):
        saved = {"event": "checkpoint", "rank": 0, "t": 1.62, "step": 5, "path": "step-5", "seconds": 0.1}
        events = sorted([*broken(), saved], key=lambda event: event["t"])
        traces, _ = faults_parts(info_of(events))
        (mark,) = [trace for trace in traces if trace["name"] == "resumed from"]
        assert (mark["x"], mark["y"]) == ([pytest.approx(1.62)], [5])

    def test_a_slow_rank_is_a_mark_in_its_row_and_no_failure(self):
        slow = {**kill(0, 1.25, 3), "kind": "slow", "text": "rank 0 computes 3 times slower in steps 3 to 4"}
        info = info_of([*started(0.0), *steps(1, 5, 1.0), slow])
        assert [(mark.rank, mark.at_s) for mark in info.marks] == [(0, 1.25)]
        assert info.incidents == ()
        assert "Also: rank 0 computes 3 times slower in steps 3 to 4." in _faults.faults_text(info)
