"""The lab's part for many architectures: strategies in families, their own settings, panels, and the check."""

from __future__ import annotations

import threading

import pytest

import shardscope as ss
from conformance.runs import wait_for
from shardscope.errors import RunFailed, SpecError
from shardscope.runtime.tools.check_report import compare
from shardscope.spec import registry
from shardscope.spec.strategy import strategies
from shardscope_widgets.job_form.families import settings_of_method, strategy_families
from widgets.fake_runs import consensus_events, fake_run, memory_events, schedule_events, update_events


class TestFamilies:
    def test_every_strategy_has_its_place_once(self):
        listed = [kind for _, kinds in strategy_families() for kind in kinds]
        assert sorted(listed) == sorted(registry.names(ss.Strategy))

    def test_settings_come_from_the_spec_with_its_own_words(self):
        (directions,) = settings_of_method(ss.Strategy, "ring")
        assert (directions.kind, directions.values, directions.default) == ("choice", (("1", 1), ("2", 2)), 1)
        (per_node,) = settings_of_method(ss.Strategy, "hierarchical")
        assert (per_node.kind, per_node.optional, per_node.default) == ("count", True, None)


class TestOptions:
    def test_only_the_chosen_strategys_settings_are_there(self, lab):
        def shown():
            fields = lab.screen.options["strategy"].children
            assert all(control.tooltip in about.value for control, about in (box.children for box in fields))
            return [box.children[0].description for box in fields]

        assert shown() == ["Ring directions"]
        lab.strategy = "hierarchical"
        assert shown() == ["Ranks per node"]
        lab.strategy = "all-reduce"
        assert lab.screen.options["strategy"].children == ()
        assert lab.screen.options["strategy"].layout.display == "none"

    def test_a_control_sets_the_option_and_the_other_way_round(self, lab):
        lab.screen.options["strategy"].controls["directions"].value = 2
        assert lab.strategy_options == {"directions": 2}
        assert lab.job().strategy.label == "ring:2"
        lab.strategy_options = {}
        assert lab.screen.options["strategy"].controls["directions"].value == 1

    def test_a_short_string_sets_the_option_that_it_names(self, lab):
        lab.strategy = "ring:2"
        assert (lab.strategy, lab.strategy_options) == ("ring", {"directions": 2})
        lab.strategy = "hierarchical:2"
        assert lab.job().strategy.per_node == 2

    def test_going_back_to_a_strategy_finds_it_as_it_was(self, lab):
        lab.strategy_options = {"directions": 2}
        lab.strategy = "tree"
        assert lab.strategy_options == {}
        lab.strategy = "ring"
        assert lab.strategy_options == {"directions": 2}

    def test_nothing_stands_for_the_specs_own_choice(self, lab):
        lab.strategy = "hierarchical"
        per_node = lab.screen.options["strategy"].controls["per_node"]
        assert (per_node.value, per_node.placeholder) == ("", "default")
        per_node.value = "2"
        assert lab.job().strategy.per_node == 2
        per_node.value = ""
        assert lab.job().strategy.per_node is None

    def test_a_setting_that_is_left_open_refuses_what_is_no_number_and_stays_open(self, lab):
        lab.strategy = "pipeline"
        options = lab.screen.options["strategy"]
        for typed in ("0", "two"):
            options.controls["virtual_stages"].value = typed
            assert options.controls["virtual_stages"].value == ""
            assert f"virtual_stages=&#x27;{typed}&#x27; is not valid" in options.refusal.value
        assert lab.job().strategy.virtual_stages is None

    def test_a_setting_that_is_hidden_is_kept_and_not_used(self, lab):
        lab.strategy = "parameter-server:ssp"
        lab.screen.options["strategy"].controls["staleness"].value = 3
        assert lab.job().strategy.bound == 3
        lab.screen.options["strategy"].controls["mode"].value = "sync"
        assert lab.job().strategy.bound == 0
        lab.screen.options["strategy"].controls["mode"].value = "ssp"
        assert lab.job().strategy.bound == 3

    def test_what_cannot_be_is_said_beside_the_button(self, lab):
        lab.strategy = "hierarchical"
        lab.screen.options["strategy"].controls["per_node"].value = "3"
        assert lab.screen.start.disabled
        assert "strategy.per_node=3 does not divide" in lab.screen.plan.value

    def test_a_schedule_of_ones_own_can_be_chosen_whenever_its_cell_is_run(self, lab):
        def make(**fields):
            annotations = dict.fromkeys(fields, int)
            members = {"name": "late", "order": lambda self, rank, ranks, n, held: []}
            return ss.register(
                type("Late", (ss.PipelineSchedule,), {**members, **fields, "__annotations__": annotations})
            )

        lab.strategy = "pipeline"
        make()
        try:
            lab.strategy = "pipeline:late"
            assert lab.screen.options["strategy"].controls["schedule"].value == "late"
            make(ahead=1)  # the cell is run again
            lab.strategy = "ring"
            lab.strategy = "pipeline"
            assert "empty" not in lab.screen.plan.value
            assert "has no passes for micro-batch" in lab.screen.plan.value
        finally:
            registry._of_users.clear()

    @pytest.mark.parametrize("kind", strategies())
    def test_every_strategy_can_be_chosen_and_every_setting_has_words(self, lab, kind):
        lab.world_size = 4
        lab.strategy = kind
        assert lab.job().strategy.name == kind
        assert all(
            control.description and control.tooltip
            for control in lab.screen.options["strategy"].controls.values()
        )
        assert not lab.screen.start.disabled


class TestPanels:
    def panels(self, make_lab, runtime, *events, kind="ring"):
        run = fake_run(kind, 2, steps=3)
        run.all_events += [event for some in events for event in some]
        runtime.known = [run]
        panels = make_lab().screen.panels
        names = ("schedule", "staleness", "consensus", "memory")
        return panels, [name for name in names if getattr(panels, name).box.layout.display is None]

    def test_a_run_without_their_events_shows_none(self, make_lab, runtime):
        assert self.panels(make_lab, runtime)[1] == []

    @pytest.mark.parametrize(
        ("events", "name", "words"),
        [
            (schedule_events(2, 4), "schedule", "4 micro-batches through 2 stages"),
            (update_events([[0], [1]]), "staleness", "2 gradients in 2 updates"),
            (consensus_events([0.1, 0.01]), "consensus", "at most 1.0e-01"),
            (memory_events(2), "memory", "peak memory per rank 3.61 MB"),
        ],
    )
    def test_each_appears_with_its_events(self, make_lab, runtime, events, name, words):
        panels, shown = self.panels(make_lab, runtime, events)
        assert shown == [name]
        panel = getattr(panels, name)
        assert words in panel.words.value
        assert panel.figure.traces

    def test_one_process_beside_it_is_a_line_in_the_memory_panel(self, make_lab, runtime):
        runs = [fake_run("single", steps=3), fake_run("ring", 2, steps=3)]
        runs[0].all_events += memory_events(1)
        runs[1].all_events += memory_events(2)
        runtime.known = runs
        assert make_lab().screen.panels.memory.figure.figure["layout"]["shapes"][0]["line"]["dash"] == "dash"

    def test_they_go_when_another_run_is_looked_at(self, make_lab, runtime):
        runs = [fake_run("ring", 2, steps=3, run_id=f"run-{n}") for n in range(2)]
        runs[1].all_events += schedule_events(2, 2)
        runtime.known = runs
        lab = make_lab()
        assert lab.screen.panels.schedule.box.layout.display is None
        lab.focus = "run-0"
        assert lab.screen.panels.schedule.box.layout.display == "none"


class TestCheck:
    @pytest.fixture
    def gate(self, monkeypatch):
        """A check that waits at its first step until it is let go."""
        opened = threading.Event()
        done = {}

        def check(job, steps, *, root, on_step):
            run = fake_run("ring", 2, steps=0)
            run.job = run.job.replace(strategy=job.strategy, steps=steps)
            on_step(run, 1)
            while not opened.wait(0.01):
                on_step(run, 1)
            if isinstance(done.get("raise"), Exception):
                raise done["raise"]
            import numpy as np

            value = {"<w>": np.ones(2)}
            return compare(job, ("a", "b"), ({1: 2.0}, {1: 2.0}), (value, value))

        monkeypatch.setattr("shardscope.runtime.tools.check.check", check)
        opened.then = done
        return opened

    def test_the_button_returns_at_once_tells_how_far_it_is_and_leaves_the_verdict(self, lab, gate):
        lab.screen.check.click()
        wait_for(lambda: "ring on 2 ranks, step 1 of 8" in lab.check.box.value)
        assert lab.screen.check.description == "Cancel"
        gate.set()
        report = lab.check.wait(60)
        assert report.passed
        assert "ring on 2 ranks agrees with one process" in lab.check.box.value
        assert "&lt;w&gt;" in lab.check.box.value
        wait_for(lambda: lab.screen.check.description == "Check")

    def test_a_second_press_gives_it_up(self, lab, gate):
        lab.screen.check.click()
        lab.screen.check.click()
        assert lab.check.wait(60) is None
        assert "cancelled" in lab.check.box.value

    def test_a_failed_rank_shows_in_place(self, lab, gate):
        gate.then["raise"] = RunFailed(
            "rank 1 failed: <boom>", rank=1, step=2, strategy="ring", traceback="line 3"
        )
        gate.set()
        lab.screen.check.click()
        assert lab.check.wait(60) is None
        assert "rank 1 failed: &lt;boom&gt;" in lab.check.box.value
        assert "line 3" in lab.check.box.value

    def test_one_process_needs_no_check(self, lab):
        lab.strategy = "single"
        assert lab.screen.check.disabled
        lab.strategy = "ring"
        assert not lab.screen.check.disabled

    def test_the_next_run_takes_the_verdict_away(self, lab, gate):
        gate.set()
        lab.start_check()
        lab.check.wait(60)
        lab.start()
        assert lab.check.box.value == ""

    def test_a_job_that_cannot_exist_is_not_checked(self, lab):
        lab.global_batch = 31
        assert lab.screen.check.disabled
        with pytest.raises(SpecError):
            lab.start_check()
