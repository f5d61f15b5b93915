"""The Fault Lab: a run that was killed and recovered, buttons that say what they do, and the Training Lab's tab."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest

import shardscope as ss
from conformance.runs import wait_for
from shardscope.spec import Checkpoint, Recovery
from shardscope.spec.units import plural
from shardscope_widgets import FaultLab
from shardscope_widgets.fault_lab import Breaker
from shardscope_widgets.fault_lab._words import Standing, drop_text, kill_text, slow_text
from shardscope_widgets.figures import _faults
from shardscope_widgets.job_form.choices import JobChoices
from shardscope_widgets.job_form.from_job import choices_of
from shardscope_widgets.kit.guard import Guard
from shardscope_widgets.trace import Trace
from widgets.fake_runs import fake_job, fake_run
from widgets.test_fault_figure import broken as broken_events

pytestmark = pytest.mark.timeout(120)
SURE = {"checkpoint": Checkpoint(every=10), "recovery": Recovery(3)}


@pytest.fixture(scope="module")
def killed(tmp_path_factory):
    """Two ranks, of which one was killed before step 8, after a checkpoint of step 5."""
    job = ss.Job(
        model="mlp", data="digits", strategy="zero-2", world_size=2, batch=16, steps=12, checkpoint=Checkpoint(every=5),
        recovery=Recovery(2),
    )  # fmt: skip
    faults = ss.Faults().kill(rank=1, step=8)
    return ss.launch(job, faults=faults, root=tmp_path_factory.mktemp("runs")).wait(timeout=90)


class TestLab:
    def test_it_names_the_rank_the_checkpoint_and_the_lost_steps_of_a_run_on_disk(self, killed):
        lab = FaultLab(killed.id, root=killed.path.parent)
        try:
            assert lab.problem == ""
            (incident,) = lab.view.info.incidents
            assert (incident.rank, incident.last_step, incident.resumed) == (1, 7, 5)
            assert incident.num_lost in {
                1,
                2,
            }  # rank 0 may be ended before it has written that it finished step 7
            lost = plural(incident.num_lost, "finished step")
            assert f"{lost} had to be repeated" in lab.view.words.value
            assert "lost work" in lab.view.legend.value
            assert "this run has ended, so no faults can be injected" in lab.breaker.said.value.lower()
            assert "step 12 of 12" in lab.status.value
        finally:
            lab.close()

    def test_times_are_in_order_and_add_up(self, killed):
        info = _faults.faults_info(Trace.read(killed))
        (incident,) = info.incidents
        assert 0 < incident.failed_s <= incident.detected_s < incident.again_s < info.end_s
        for rank in (0, 1):
            own = [bar for bar in info.bars if bar.rank == rank]
            assert sum(bar.end_s - bar.start_s for bar in own) == pytest.approx(info.end_s, abs=0.6)
            assert all(a.end_s <= b.start_s + 1e-6 for a, b in pairwise(own))

    def test_without_runs_it_says_how_to_launch_one(self, tmp_path):
        lab = FaultLab(root=tmp_path)
        try:
            assert "ss.launch" in lab.status.value
            assert lab.view.figure.layout.display == "none"
        finally:
            lab.close()

    def test_an_unknown_option_is_named(self, tmp_path):
        with pytest.raises(TypeError, match="no option 'runs'"):
            FaultLab(root=tmp_path, runs=3)

    def test_a_rank_is_killed_from_the_lab_and_the_run_goes_on(self, tmp_path):
        job = ss.Job(
            model="mlp", data="digits", strategy="ring", world_size=2, batch=16, steps=100_000,
            checkpoint=Checkpoint(every=20), recovery=Recovery(2),
        )  # fmt: skip
        run = ss.launch(job, root=tmp_path)
        lab = FaultLab(run, root=tmp_path)
        try:
            wait_for(lambda: run.newest_checkpoint is not None)
            lab.refresh()
            lab.breaker.choices.rank = 1
            lab.breaker.kill()
            assert "rank 1 killed" in lab.breaker.said.value
            wait_for(
                lambda: lab.view.info.incidents and lab.view.info.incidents[0].again_s is not None,
                timeout=60,
            )
            assert lab.view.info.incidents[0].rank == 1
            assert run.is_alive
            run.stop()
            lab.refresh()
            assert lab.breaker.resumer.box.layout.display is None
            assert lab.problem == ""
        finally:
            lab.close()
            run.stop()


class TestSentences:
    @pytest.mark.parametrize(
        ("standing", "step", "told"),
        [
            (Standing(fake_job(**SURE), 47, 40), 0, "from the checkpoint of step 40, and repeat 7 steps."),
            (Standing(fake_job(**SURE), 47, 40), 56, "from the checkpoint of step 50, and repeat 5 steps."),
            (Standing(fake_job(**SURE), 4, 0), 0, "from the beginning, as there is no checkpoint, and repeat 4 steps."),
            (Standing(fake_job(), 47, 0), 0, "The run then fails, because its job has no recovery"),
        ],
    )  # fmt: skip
    def test_a_kill_says_from_where_training_continues(self, standing, step, told):
        assert told in kill_text(standing, 1, step)
        assert ("before step 56" if step else "before its next step") in kill_text(standing, 1, step)

    def test_slowing_says_who_waits(self):
        def text(strategy, **changes):
            return slow_text(Standing(fake_job(strategy, **changes), 3, 0), 1, 0, 3.0, 20)

        assert "all ranks wait for the slowest" in text("ring")
        assert "do not wait for it" in text("parameter-server:async", world_size=3)
        assert "gradients are 1 update stale, and then wait" in text("parameter-server:ssp", world_size=3)

    def test_dropping_a_link_says_whether_ranks_wait_or_fail(self):
        assert "wait until its messages arrive" in drop_text(1, 0, 3.0, 60.0)
        assert "fails or restarts" in drop_text(1, 7, 90.0, 60.0)


class TestBreaker:
    @pytest.fixture
    def broken(self):
        """A breaker of a run that is running, and the problems it has shown."""
        problems = []
        run = fake_run(steps=12, world_size=3, **SURE)
        run.state = "running"
        breaker = Breaker(Guard(problems.append), lambda run: problems.append(run.id))
        breaker.show(run, Trace.read(run))
        return breaker, run, problems

    def test_each_button_names_the_rank_and_says_what_it_does(self, broken):
        breaker, _run, _ = broken
        breaker.choices.rank = 2
        assert breaker.buttons["kill"].description == "Kill rank 2"
        assert "process of rank 2" in breaker.sentences["kill"].value
        assert "Rank 2 computes 3 times slower for 20 steps" in breaker.sentences["slow"].value
        assert breaker.buttons["kill"].tooltip in breaker.sentences["kill"].value.replace("&#x27;", "'")

    def test_pressing_sends_the_fault_to_the_run(self, broken):
        breaker, run, problems = broken
        breaker.choices.rank, breaker.choices.num_steps = 2, 5
        breaker.buttons["kill"].click()
        assert "Requested: rank 2 killed before its next step." in breaker.said.value
        breaker.buttons["slow"].click()
        assert (
            "rank 2 computes 3 times slower for 5 steps, starting with its next step." in breaker.said.value
        )
        breaker.choices.step = 40
        breaker.buttons["kill"].click()
        assert "Requested: rank 2 killed before step 40." in breaker.said.value
        assert [str(each) for each in run.injected] == [
            "kill rank=2 step=13", "slow rank=2 factor=3 steps=13-17", "kill rank=2 step=40",
        ]  # fmt: skip
        assert problems == []

    def test_only_an_emulated_cluster_has_links_to_drop(self, broken):
        breaker, run, _ = broken
        assert breaker._rows["drop"].layout.display == "none"
        run = replace(run, id="other", cluster=ss.Cluster.emulated(3, "1 Gbit/s", "1 ms"))
        breaker.show(run, Trace.read(run))
        assert breaker._rows["drop"].layout.display is None
        breaker.choices.rank = 1
        breaker.buttons["drop"].click()
        assert run.injected[-1] == ss.Faults().drop_link("n1", step=13, lasts="3 s")

    def test_a_run_that_ended_can_be_resumed_but_not_broken(self, broken):
        breaker, run, problems = broken
        run.state, run.newest_checkpoint = "stopped", 10
        breaker.show(run, Trace.read(run))
        assert breaker.body.layout.display == "none"
        assert "from the checkpoint of step 10; 2 steps remain" in breaker.resumer.sentence.value
        breaker.resumer.button.click()
        assert problems == [run.id]

    def test_a_run_without_a_checkpoint_or_without_steps_left_cannot_be_resumed(self, broken):
        breaker, run, _ = broken
        run.state = "completed"
        for saved in (None, run.job.last_step):
            run.newest_checkpoint = saved
            breaker.show(run, Trace.read(run))
            assert breaker.resumer.box.layout.display == "none"


class TestTrainingLab:
    def test_checkpoints_and_restarts_are_part_of_the_job(self):
        choices = JobChoices(checkpoint_every=20, restarts=2)
        job = choices.job()
        assert (job.checkpoint.every, job.recovery.restarts) == (20, 2)
        assert {name: choices_of(job)[name] for name in ("checkpoint_every", "restarts")} == {
            "checkpoint_every": 20, "restarts": 2,
        }  # fmt: skip
        assert (JobChoices().job().checkpoint.every, JobChoices().job().recovery) == (None, None)

    def test_the_faults_tab_follows_the_run_in_focus(self, make_lab, runtime):
        lab = make_lab(restarts=1, checkpoint_every=5)
        lab.start()
        lab.refresh()
        assert "Faults" in lab.screen.tabs.titles
        assert lab.screen.breaker.body.layout.display is None
        lab.screen.breaker.buttons["kill"].click()
        assert str(runtime.known[-1].injected[0]).startswith("kill rank=0")
        runtime.known[-1].stop()
        lab.refresh()
        assert lab.screen.breaker.body.layout.display == "none"

    def test_the_status_says_what_a_failure_cost(self, make_lab, runtime):
        run = fake_run("ring", 2, steps=1)
        run.all_events = broken_events()
        runtime.known = [run]
        lab = make_lab()
        assert "Restarted once. Rank 1 killed before step 8, noticed after " in lab.status
        assert "from the checkpoint of step 5 on disk, and 2 finished steps had to be repeated." in lab.status

    def test_without_a_run_there_is_nothing_to_kill_below_the_predicted_step(self, lab):
        assert lab.screen.of_ranks.layout.display == "none"
        lab.start()
        assert lab.screen.of_ranks.layout.display is None

    def test_resuming_starts_a_run_of_the_same_job(self, make_lab, runtime):
        lab = make_lab(restarts=1, checkpoint_every=5)
        run = lab.start()
        run.stop()
        run.newest_checkpoint = 5
        lab.refresh()
        lab.screen.breaker.resumer.button.click()
        assert len(runtime.known) == 2
        assert runtime.known[-1].job == run.job
        assert lab.focus == runtime.known[-1].id
