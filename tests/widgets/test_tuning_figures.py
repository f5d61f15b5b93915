"""The figures of a study: what is on the front and where, what is said, what another link does to it."""

from __future__ import annotations

import pytest
from torch import nn

import shardscope as ss
from shardscope.spec.space import Space
from shardscope.tuning.measured import TrialMetrics
from shardscope.tuning.records import TrialRecord
from shardscope.tuning.report import StudyReport
from shardscope_widgets import figures
from shardscope_widgets.figures import _front, _importances, _parallel, _slices, _trial_curves, _trials
from shardscope_widgets.tuning_lab import _summary, _table
from shardscope_widgets.tuning_lab._relink import PENDING, Relinker, notes_of

OBJECTIVES = ("loss", "seconds", "bytes")
SPACE = Space({"optimizer.lr": (1e-3, 1e-1, "log"), "batch": ss.PowersOfTwo(32, 128), "warmup": (0.0, 0.3)})


def record(number, state="complete", *, loss=1.0, step_s=0.01, sent=1000, start=2.0, steps=10, **fields):
    done = steps if state == "complete" else steps // 2
    part = done / steps
    curve = ((steps // 2, start, 0.5), *(((steps, loss, 0.1),) if state == "complete" else ()))
    measured = TrialMetrics(done, step_s, step_s / 2, 0.0, int(sent * part), 4, 100, curve)
    values = {"loss": loss, "seconds": step_s * steps, "bytes": float(sent)} if state == "complete" else None
    common = {
        "params": {"optimizer.lr": 0.01 * (number + 1), "batch": 64}, "values": values, "reason": None,
        "origin": "drawn",
        "run": None, "host": None, "measured": measured, "retry_of": None, "counted": True, "pinned": False,
    }  # fmt: skip
    return TrialRecord(number=number, state=state, **{**common, **fields})


def trials(*records, live=None):
    return _trials.trials_info(records, OBJECTIVES, steps_of=lambda _: 10, live=live)


@pytest.fixture
def four():
    return trials(
        record(0, loss=0.5, step_s=0.04), record(1, loss=0.9, step_s=0.01), record(2, loss=0.95, step_s=0.02),
        record(3, loss=0.7, step_s=0.02, sent=9000),
    )  # fmt: skip


def test_the_front_is_that_of_all_objectives_and_the_line_that_of_the_axes(four):
    assert [trial.number for trial in four if trial.is_front] == [0, 1, 3]
    info = _front.front_info(four, x="seconds", y="loss")
    assert info.line == ((0.1, 0.9), (0.2, 0.7), (0.4, 0.5))
    assert [dot.number for dot in info.complete if not dot.is_front] == [2]
    by_bytes = _front.front_info(four, x="bytes", y="loss")
    assert by_bytes.line == ((1000.0, 0.5),)
    assert "The line joins 3 of 4 complete trials; its ends: trial 1 with 0.9" in _front.front_text(info)


def test_a_trial_that_is_only_a_little_quicker_is_neither_ringed_nor_on_the_line():
    found = trials(record(0, loss=0.5, step_s=0.04), record(1, loss=0.9, step_s=0.038))
    assert [(trial.is_front, trial.is_by_noise) for trial in found] == [(True, False), (False, True)]
    info = _front.front_info(found)
    assert info.line == ((0.4, 0.5),)
    assert "better than the front only in time, by less than 10%" in info.complete[1].text
    assert "Trial 1 is not on the front: it is only faster" in _front.front_text(info)


@pytest.mark.parametrize(
    "points", [[], [(1.0, 1.0)], [(1.0, 2.0), (1.0, 1.0), (2.0, 1.0), (3.0, 0.5), (0.5, 3.0)]]
)
def test_the_line_is_made_of_the_points_that_none_beats(points):
    def beaten(a):
        return any(b[0] <= a[0] and b[1] <= a[1] and b != a for b in points)

    assert _front.staircase(points) == tuple(sorted(point for point in points if not beaten(point)))


def test_a_running_trial_may_fall_as_steeply_as_the_best_did():
    live = TrialMetrics(5, 0.03, None, 0.0, 500, 4, 100, ((5, 1.6, 0.4),))
    found = trials(
        record(0, loss=1.0), record(1, loss=0.5), record(2, "running", measured=None), live={2: live},
    )  # fmt: skip
    running = found[2]
    assert running.best == pytest.approx(1.6 * 0.5 / 2.0)
    assert running.values == {
        "seconds": pytest.approx(0.3),
        "bytes": 1000.0,
        "memory": 100.0,
        "loss": 1.6,
        "error": 0.4,
    }
    spec = _front.front_spec(_front.front_info(found))
    assert {"running", "could reach"} <= {trace.get("name") for trace in spec["data"]}
    assert trials(record(2, "running", measured=None), live={2: live})[0].best is None


def test_pruned_trials_are_crosses_and_what_cost_no_run_has_no_place():
    found = trials(record(0), record(1, "pruned", reason="dominated"), record(2, "impossible", measured=None))
    info = _front.front_info(found)
    assert [dot.number for dot in info.pruned] == [1]
    assert "dominated" in info.pruned[0].text
    assert 2 not in {dot.number for dot in (*info.complete, *info.pruned, *info.running)}


def test_curves_run_over_the_share_of_the_training_and_are_few_traces(four):
    info = _trial_curves.trial_curves_info(four, chosen=2)
    assert [curve.kind for curve in info.curves] == ["on the front", "on the front", "chosen", "on the front"]
    assert info.curves[0].points == ((0.5, 2.0), (1.0, 0.5))
    assert len(_trial_curves.trial_curves_spec(info)["data"]) == 2
    assert "trial 0 ends lowest, at 0.5" in _trial_curves.trial_curves_text(info)


def test_a_slice_shows_every_complete_trial_that_drew_the_setting(four):
    info = _slices.slices_info(four, SPACE, objective="loss")
    assert [(one.name, one.kind) for one in info.slices] == [("optimizer.lr", "log"), ("batch", "category")]
    assert info.slices[0].points[0] == (0.01, 0.5, 0, True)
    assert info.slices[1].values == (32, 64, 128)


def test_importances_say_what_they_need():
    few = _importances.importances_info({}, objective="loss", trials=3)
    assert "need 6 complete trials; so far there are 3" in _importances.importances_text(few)
    needed = _importances.trials_needed(10)
    many = _importances.importances_info({}, objective="loss", trials=13, needed=needed)
    assert "need 20 complete trials; so far there are 13" in _importances.importances_text(many)
    told = _importances.importances_info({"batch": 0.2, "optimizer.lr": 0.8}, objective="loss", trials=9)
    assert told.names == ("optimizer.lr", "batch")
    assert "optimizer.lr matters most (80% of the variance)" in _importances.importances_text(told)


JOB = ss.Job(model="mlp", data="digits", strategy="ring", world_size=2)
SLOW = ss.Link(bandwidth="10 Mbit/s", latency="1 ms")


def test_another_link_moves_times_and_the_front_and_says_who_has_no_place(four):
    """Trial 0 sends a hundredth of what trials 1 and 2 send; steps of trial 3 differ."""
    methods = ["topk", "none", "none", ss.Compression("local-sgd", every=2)]
    relinker = Relinker(lambda number: JOB.replace(compression=methods[number]))
    waiting = relinker.onto(four, OBJECTIVES, SLOW, budget_s=0.0)
    assert notes_of(waiting) == {PENDING: [0, 1, 2, 3]}
    moved = relinker.onto(four, OBJECTIVES, SLOW)
    told = [ss.predict(JOB.replace(compression=name, link=SLOW)).step_time_s
            - ss.predict(JOB.replace(compression=name)).step_time_s for name in methods[:2]]  # fmt: skip
    measured = [trial.values["seconds"] for trial in four]
    assert [trial.values.get("seconds") for trial in moved] == [
        pytest.approx(measured[0] + 10 * told[0]), pytest.approx(measured[1] + 10 * told[1]),
        pytest.approx(measured[2] + 10 * told[1]), None,
    ]  # fmt: skip
    assert [trial.number for trial in moved if trial.is_front] == [0]
    assert notes_of(moved) == {"steps differ from one another with compression='local-sgd every=2'": [3]}
    assert _front.front_info(moved, link="10 Mbit/s").missing == 1


def test_on_its_own_link_a_trial_takes_what_it_took_and_own_functions_and_pipelines_are_predicted():
    def linear():
        return nn.Sequential(nn.Flatten(), nn.Linear(64, 10))

    own = JOB.replace(link=SLOW, strategy="pipeline:gpipe", batch=ss.Batch(64, micro_batch=16))
    jobs = [own, JOB.replace(model=linear, link=SLOW), JOB.replace(strategy="parameter-server")]
    three = trials(*map(record, range(3)))
    faster = ss.Link(bandwidth="1 Gbit/s", latency="1 ms")
    relinker = Relinker(jobs.__getitem__)
    there, here = (relinker.onto(three, OBJECTIVES, link) for link in (faster, SLOW))
    times = [[trial.values["seconds"] for trial in each] for each in (three, here, there)]
    assert times[1][:2] == times[0][:2]
    assert times[1][2] > times[0][2]
    assert times[2][0] < times[0][0]
    assert all(time >= 0 for time in times[2])


def test_the_order_of_trials_is_across_and_the_best_so_far_the_line():
    found = trials(record(0, loss=0.9), record(1, loss=0.5), record(2, loss=0.7), record(3, "pruned"))
    info = _front.front_info(found, x="trial", y="loss")
    assert info.line == ((0.0, 0.9), (1.0, 0.5), (2.0, 0.5))
    assert "Best of 3 complete trials: trial 1 with 0.5" in _front.front_text(info)


def test_settings_side_by_side_have_one_axis_each_that_differs_and_the_best_at_the_bottom():
    drawn = ({"optimizer": "adamw", "optimizer[adamw].lr": 0.01, "batch": 64}, {"optimizer": "lamb", "batch": 64},
             {"optimizer": "adamw", "optimizer[adamw].lr": 0.1, "batch": 64})  # fmt: skip
    found = trials(
        *(
            record(at, loss=loss, params=one)
            for at, (loss, one) in enumerate(zip((1, 4, 2), drawn, strict=True))
        )
    )
    info = _parallel.parallel_info(found, SPACE, objective="loss", chosen=1)
    assert [rule.name for rule in info.rules] == ["optimizer", "lr", "loss"]
    assert info.rules[1].ticks[-1][1] == _parallel.NOT_DRAWN
    assert [one.places[-1] for one in info.threads] == pytest.approx([0, 1, 1 / 3])
    assert info.threads[1].places[1] < 0 <= info.threads[0].places[1] < info.threads[2].places[1]
    assert info.best == (0, 1)
    spec = _parallel.parallel_spec(info)
    assert spec["data"][-1]["customdata"] == [1] * 4  # the chosen one, above the others
    assert figures.parallel(found, SPACE).data
    assert "once two of them differ" in _parallel.parallel_text(_parallel.parallel_info(found[:1], SPACE))


def test_the_table_has_a_column_a_setting_and_keys_in_seconds_and_bytes(four):
    info = _table.table_info(four, OBJECTIVES)
    assert info.header == ("trial", "state", "loss", "seconds", "bytes", "lr", "batch", "why")
    assert info.texts == (1, 7)
    assert info.rows[0]["keys"] == [0, "front", 0.5, 0.4, 1000.0, 0.01, 64, ""]
    assert info.rows[0]["cells"][2:7] == ["0.5", "400 ms", "1 kB", "0.01", "64"]


def test_what_stays_in_a_notebook_names_the_front_and_is_escaped(four):
    words = StudyReport("s<1>", "loss", (), (), (), "adamw has the lowest loss.", by_noise=(7,))
    text = _summary.summary_html(four, OBJECTIVES, words, "Study s<1> has finished.")
    assert text.count("<tr>") == 1 + 3
    assert "trial\u00a00</td><td>0.5</td><td>400 ms</td><td>1 kB</td><td>0.01</td><td>64" in text
    assert "Trial 7 is not on the front: it is only faster" in text
    assert "s&lt;1&gt;" in text
    assert "<1>" not in text
    assert _summary.summary_html([], OBJECTIVES, words, "") == ""


def test_every_figure_of_a_study_is_one_that_plotly_takes(four):
    info = _importances.importances_info({"batch": 0.2}, objective="loss", trials=9)
    found = [
        figures.front(four), figures.trial_curves(four), figures.slices(four, SPACE), figures.importances(info),
        figures.collectives({"ring_all_reduce": 4000, "broadcast": 0}, 4), figures.front([]), figures.trial_curves([]),
    ]  # fmt: skip
    assert [len(figure.data) for figure in found] == [3, 2, 2, 1, 1, 0, 0]
