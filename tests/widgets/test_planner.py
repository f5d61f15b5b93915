"""The Planner without a browser: set traits, click, and look at what it says."""

from __future__ import annotations

from math import log10

import pytest

from planner.brute import machine, small_model
from shardscope.errors import LaunchError, SpecError
from shardscope.planner import plan
from shardscope.planner.rules import REASONS
from shardscope.planner.shipped import lacking
from shardscope.planner.table import SPARE, budget_of, days_text, recommended
from shardscope.planner.trainer_config import trainer_config
from shardscope.prediction.predict import predict
from shardscope.spec.cluster import Cluster
from shardscope.spec.compression import Compression
from shardscope.spec.layout import Layout
from shardscope_widgets import Planner, figures
from shardscope_widgets.figures import _plans
from shardscope_widgets.planner._screen import as_in_form


@pytest.fixture(scope="module")
def planner():
    made = Planner(small_model(), cluster=machine(nodes=2, per_node=4), global_batch=16)
    yield made
    made.close()


@pytest.fixture(autouse=True)
def as_at_first(request):
    yield
    if "planner" in request.fixturenames:
        made = request.getfixturevalue("planner")
        made.set_trait("weights", {"time": 1.0})
        made.set_trait("fix", {})
        made.set_trait("global_batch", 16)
        made.set_trait("chosen", 1)


def shown_ranks(planner):
    return [row[0] for row in planner.screen.table.rows]


def test_it_shows_the_best_fifteen_and_the_first_is_chosen(planner):
    assert planner.problem == ""
    assert shown_ranks(planner) == [str(rank) for rank in range(1, 16)]
    assert planner.chosen == planner.screen.table.chosen == 1
    assert "small fits on 8 devices" in planner.screen.status.value


def test_choosing_a_row_lays_it_beside_the_best(planner):
    planner.screen.table.chosen = 5
    assert planner.chosen == 5
    assert "Plan 5 takes" in planner.screen.told.value
    names = {name for trace in planner.screen.terms.figure["data"] for name in trace["y"]}
    assert names == {"plan 1", "plan 5"}


def test_clicking_a_point_chooses_its_plan(planner):
    planner.screen.scatter.clicked = int(planner.plans.order[8])
    assert planner.chosen == 9
    marks = [trace for trace in planner.screen.scatter.figure["data"] if trace["name"] == "chosen"]
    assert marks[0]["x"] == [planner.plans[8].step_time_s / planner.plans.step_time_s.min() - 1 + _plans.NEAR]


def test_stages_differ_by_symbol_and_points_spread_over_the_axis(planner):
    info = _plans.plans_info(planner.plans)
    dots = [trace for trace in _plans.scatter(info)["data"] if trace["mode"] == "markers"]
    symbols = [trace["marker"]["symbol"] for trace in dots]
    assert len(set(symbols)) == len(symbols) == len({point.pipeline for point in info.points})
    left, right = _plans.scatter(info)["layout"]["xaxis"]["range"]
    places = sorted((log10(x) - left) / (right - left) for trace in dots for x in trace["x"])
    assert places[len(places) // 10] < 0.6 < places[-len(places) // 10]


def test_a_token_budget_gives_the_days_and_the_dollars_of_the_training(planner):
    planner.tokens_billions = 2.0
    best = planner.plans.best
    whole = budget_of(planner.plans, best, 2e9)
    assert whole.days == pytest.approx(2e9 / best.tokens_per_s / 86400)
    steps = 2e9 / (planner.global_batch * planner.plans.setting.model.seq)
    assert whole.dollars is None or whole.dollars == pytest.approx(steps * best.dollars)
    assert f"2 G tokens</span> <b>{days_text(whole.days)}</b>" in planner.screen.numbers.value
    assert "time to train" in planner.screen.table.header
    planner.chosen = 3
    planner.tokens_billions = 300.0
    assert planner.chosen == 3  # another budget keeps the ranking


def test_the_table_in_a_notebook_has_units(planner):
    shown = planner.plans._repr_html_()
    assert "MiB" in shown
    assert "e+" not in shown


def test_another_model_brings_its_own_sequence_length_and_batch():
    planner = Planner("gpt3-175b", device="h100-80gb", nodes=8, global_batch=64)
    assert (planner.seq, planner.global_batch) == (2048, 64)
    planner.model = "llama-3-70b"
    assert (planner.seq, planner.global_batch) == (8192, 512)
    best = planner.plans.best
    _, cluster, calibration = planner.plans.setting
    found = predict(planner.transformer, cluster, best.layout, calibration)
    assert best.mfu == pytest.approx(found.mfu)
    planner.chosen = 1
    assert f"<b>{found.mfu:.1%}</b>" in planner.screen.numbers.value
    assert f"<b>{found.peak_bytes / 2**30:.1f} GiB</b>" in planner.screen.numbers.value
    assert "global batch 512, sequence length 8,192" in planner.screen.advice.value
    planner.seq = 4096
    assert planner.plans.setting.model.seq == 4096
    planner.close()


def test_the_chosen_plan_has_settings_for_its_framework_or_a_reason_why_not(planner):
    planner.fix = {"schedule": "1f1b", "offload": "none"}
    planner.chosen = 2
    assert planner.plans.trainer_config(2).command == planner.screen.flags.text
    planner.fix = {"schedule": "zbv", "pipeline": 2, "offload": "none"}
    assert "Megatron-Core does not support the zbv schedule" in planner.screen.remarks.value
    assert planner.screen.flags.layout.display == "none"


@pytest.mark.parametrize(
    ("layout", "software", "told"),
    [
        ({"tensor": 2}, "deepspeed", "hold Tensor ranks fixed at 1, or choose megatron-core under Framework"),
        ({"pipeline": 2}, "deepspeed", "hold Pipeline stages fixed at 1, or choose"),
        ({"zero": 1}, "torchtitan", "untick the box above and do not hold these axes fixed"),
        (
            {"zero": 1},
            "fsdp2",
            "ZeRO stage 1 is not an option of torchtitan, which shards gradients, too; choose",
        ),
        (
            {"offload": "all", "zero": 3},
            "deepspeed",
            "support Offload all without Recompute full of all layers; to",
        ),
        ({}, "nemo", "settings for framework nemo cannot be written yet; use one of megatron-core, fsdp2"),
        ({"compression": Compression("int8")}, "megatron-core", "Compression int8 is not a setting"),
    ],
)
def test_what_settings_cannot_say_is_told_in_words_of_the_form(layout, software, told):
    whole = {"data": 2, "global_batch": 4} | layout
    with pytest.raises(SpecError) as refused:
        trainer_config(small_model(), Layout(**whole), software)
    text = as_in_form(str(refused.value))
    assert told in text
    assert not any(part in text for part in ("fix=", "in fix", "='"))


def test_a_framework_predicts_every_layout_and_forgets_steps_of_another_one(planner):
    planner.measure(1.05 * planner.plans.best.step_time_s)
    planner.software = "fsdp"
    assert planner.measured == []
    assert {plan.software for plan in planner.plans} == {planner.software} == {"fsdp2"}
    planner.software = "megatron-core"
    assert planner.plans.best.software == "megatron-core"


def test_a_search_for_each_framework_draws_the_reasons_of_what_it_leaves_out():
    assert _plans.REASON_NAMES.keys() == REASONS.keys()
    planner = Planner(
        "llama-3-8b", cluster=Cluster.of("h100-80gb", nodes=1), global_batch=64, software="deepspeed"
    )
    assert planner.problem == ""
    assert any(
        "does not support pipelines with" in text for text in planner.screen.rejected.figure["data"][0]["y"]
    )
    planner.close()


def test_a_plan_that_leaves_memory_for_errors_is_recommended_beside_the_fastest():
    made = Planner("llama-3-70b", device="h100-80gb", nodes=8)
    best, plan = made.plans.best, recommended(made.plans)
    room = best.memory_bytes + best.headroom_bytes
    assert best.headroom_bytes < SPARE * room <= plan.headroom_bytes
    assert all(row.headroom_bytes < SPARE * room for row in made.plans[: plan.rank - 1])
    assert made.chosen == made.screen.pick.value == made.screen.table.chosen == plan.rank == 2
    longer = f"{plan.step_time_s / best.step_time_s - 1:.1%} longer than plan 1"
    assert longer in made.screen.advice.value
    assert longer in figures.plans_text(made.plans)
    assert "completed" in made.screen.status.value
    made.screen.pick.value = 1
    assert made.chosen == 1
    assert "ss-full" in made.screen.numbers.value
    assert "warning" in made.screen.status.value  # amber: little memory is left
    made.chosen = 5
    assert made.screen.pick.value is None
    assert recommended(made.plans.by("headroom")).rank == 1
    made.close()


def test_what_the_framework_lacks_is_a_box_that_says_its_gain():
    made = Planner("llama-3-70b", device="h100-80gb", nodes=8)
    saved = 1 - made.plans.beyond.step_time_s / made.plans.best.step_time_s
    assert f"v-half schedule would make the step {saved:.0%} shorter" in made.screen.unshipped.description
    made.screen.unshipped.value = True
    assert made.problem == ""
    assert {row.software for row in made.plans} == {"megatron-core"}
    assert made.plans.best.layout.schedule == "v-half"
    made.chosen = 1
    assert "untick the box above" in made.screen.remarks.value
    made.unshipped = False
    assert made.plans.best.layout.schedule == "1f1b"
    made.close()


def test_a_model_that_fits_only_with_offloading_says_so_and_names_offloading_in_words_of_the_form():
    made = Planner("llama-3-70b", device="h100-80gb", nodes=1)
    assert "It fits only with offloading to the host" in made.screen.status.value
    assert "Offload states below ZeRO stage 3 would make" in made.screen.unshipped.description
    made.close()


def test_the_mesh_shows_the_groups_of_the_chosen_plan(planner):
    planner.fix = {"tensor": 2, "pipeline": 2, "offload": "none"}
    screen = planner.screen
    assert screen.by.options == ("tensor", "data", "pipeline")
    screen.by.value = "pipeline"
    stages = [text for row in screen.mesh.figure["data"][0]["text"] for text in row if text]
    assert sorted(stages) == ["0"] * 4 + ["1"] * 4
    planner.chosen = 3
    assert screen.by.value == "pipeline"
    planner.fix = {"pipeline": 1, "tensor": 2, "offload": "none"}
    assert screen.by.value == "tensor"


def test_weights_rank_anew_without_a_search(planner):
    kept = planner.plans.pools
    planner.controls["Weights"]["headroom"].value = 3.0
    assert planner.plans.pools is kept
    assert planner.plans.objective == {"time": 1.0, "headroom": 3.0}
    planner.controls["Weights"]["time"].value = 0.0
    assert planner.plans.best.headroom_bytes == max(planner.plans.headroom_bytes)


def test_a_filter_searches_again(planner):
    planner.controls["Hold fixed"]["tensor"].value = 2
    assert {row.layout.tensor for row in planner.plans} == {2}
    assert planner.fix == {"tensor": 2}


def test_it_searches_only_what_the_framework_ships_unless_an_axis_is_held_fixed(planner):
    planner.fix = {"offload": "none", "pipeline": 4}
    assert all(not lacking(each.software, each.layout, small_model()) for each in planner.plans)
    assert "software=" not in planner.screen.note.value + planner.screen.remarks.value
    planner.controls["Model and cluster"]["software"].value = "megatron-core"
    found = planner.plans
    assert {each.layout.schedule for each in found} <= {"1f1b", "interleaved"}
    assert {each.layout.zero for each in found} <= {0, 1}
    assert "settings that Megatron-Core does not support" in planner.screen.unshipped.description
    planner.controls["Hold fixed"]["schedule"].value = "zbv"
    assert {each.layout.schedule for each in planner.plans} == {"zbv"}
    assert "Megatron-Core does not support the zbv schedule" in planner.screen.remarks.value


def test_dropdowns_show_what_is_fixed_and_keep_what_they_do_not_offer(planner):
    controls = planner.controls["Hold fixed"]
    planner.fix = {"schedule": ["interleaved", "1f1b"], "tensor": [4, 1], "micro_batch": 2}
    assert controls["schedule"].label == "interleaved or 1f1b"
    assert (controls["tensor"].label, controls["offload"].label) == ("4 or 1", "any")
    controls["recompute"].value = "full"
    assert planner.problem == ""
    assert planner.fix["micro_batch"] == 2
    found = [row.layout for row in planner.plans]
    assert {(each.micro_batch, each.recompute) for each in found} == {(2, "full")}
    assert {each.tensor for each in found} <= {1, 4}
    planner.fix = {}
    assert {control.value for control in controls.values()} == {"any"}


@pytest.mark.parametrize(
    ("fix", "label"), [({"tensor": [2, 1]}, "2 or 1"), ({"tensor": 3}, "3"), ({"tensor": []}, "nothing")]
)
def test_it_starts_with_values_that_no_dropdown_offers(fix, label):
    made = Planner(small_model(), cluster=machine(nodes=1, per_node=2), fix=fix)
    assert made.controls["Hold fixed"]["tensor"].label == label
    assert ("leaves nothing to try" in made.problem) == (label == "nothing")
    made.close()


def test_what_cannot_be_is_said_in_place(planner):
    planner.fix = {"tensor": 3}
    assert "No layout of small fits on 8 devices" in planner.screen.status.value
    assert "no layout of small on 8 devices is valid" in planner.screen.note.value
    assert planner.screen.table.rows == []
    planner.fix = {"tensr": 3}
    assert "did you mean" in planner.problem


def test_a_precision_that_the_device_lacks_is_refused_without_empty_plots_beside_it(planner):
    planner.precision = "fp8-mixed"
    assert "needs matrix products in fp8, but device" in planner.problem
    screen = planner.screen
    assert [box.layout.display for box in (screen.chosen, screen.answer, screen.left_out)] == ["none"] * 3
    planner.precision = "bf16-mixed"
    assert planner.problem == ""
    assert [box.layout.display for box in (screen.chosen, screen.answer, screen.left_out)] == [None] * 3


def test_nothing_of_the_last_search_stays_after_one_that_cannot_be():
    planner = Planner("gpt2", nodes=1, global_batch=8, weights={"dollars": 1.0})
    assert "a100-80gb" in planner.screen.note.value
    planner.device = "mi300x"
    assert planner.problem == ""
    planner.device = "mi250x"
    assert "needs a price" in planner.problem
    assert planner.plans is None
    assert planner.screen.table.rows == []
    assert "Searching" not in planner.screen.status.value
    planner.controls["Weights"]["dollars"].value = 0.0
    assert planner.problem == ""
    assert planner.plans.setting.cluster.device.name == "mi250x"
    assert planner.screen.table.rows
    planner.close()


class TestMeasuredStep:
    @pytest.fixture(scope="class")
    @staticmethod
    def measured():
        made = Planner(small_model(), cluster=machine(nodes=2, per_node=4), global_batch=16)
        yield made
        made.close()

    def test_it_predicts_and_ranks_all_plans_again(self, measured):
        measured.chosen = 3
        plan_before, fastest = measured.plans[2], min(measured.plans.step_time_s)
        measured.screen.measured.seconds.value = 1.3 * plan_before.step_time_s
        measured.screen.measured.use.click()
        assert measured.problem == ""
        assert measured.plans[measured.chosen - 1].layout == plan_before.layout
        again = measured.plans[measured.chosen - 1].step_time_s
        assert again == pytest.approx(1.3 * plan_before.step_time_s, rel=0.06)
        assert min(measured.plans.step_time_s) > 1.1 * fastest
        told = measured.screen.measured.told.value
        assert "before calibration" in told
        assert "by 1 measured step" in measured.screen.note.value

    def test_a_second_step_refines_it_and_forgetting_undoes_both(self, measured):
        measured.measure(1.3 * measured.plans[0].step_time_s, rank=1)
        assert len(measured.measured) == 2
        assert "by 2 measured steps" in measured.screen.note.value
        measured.screen.measured.forget.click()
        assert measured.measured == []
        assert measured.screen.measured.forget.disabled
        assert "measured step" not in measured.screen.note.value

    def test_a_time_that_cannot_be_is_refused_in_place_and_changes_nothing(self, measured):
        best = measured.plans.best.step_time_s
        measured.screen.measured.seconds.value = 0
        measured.screen.measured.use.click()
        assert "is not a step time" in measured.problem
        measured.screen.measured.seconds.value = 1000 * best
        measured.screen.measured.use.click()
        assert "is not plausible" in measured.problem
        assert measured.measured == []
        assert measured.plans.best.step_time_s == best

    def test_another_device_forgets_the_step(self):
        planner = Planner("gpt2", nodes=1, global_batch=8)
        planner.measure(1.2 * planner.plans.best.step_time_s)
        assert planner.plans.asked.calibration is not None
        planner.device = "h100-80gb"
        assert planner.measured == []
        assert planner.plans.asked.calibration is None
        planner.close()


def test_every_control_has_a_description_and_a_tooltip(planner):
    for group in planner.controls.values():
        assert all(control.description and control.tooltip for control in group.values())


class TestFigures:
    @pytest.fixture(scope="class")
    @staticmethod
    def plans():
        return plan(small_model(), machine(nodes=2, per_node=4), global_batch=16, fix={"offload": "none"})

    def test_points_are_the_front_and_the_best_others(self, plans):
        info = _plans.plans_info(plans, most=50)
        assert len(info.points) == 50
        on_front = [info.points[place] for place in info.front]
        assert [point.time_s for point in on_front] == list(plans.front["step_time_s"])

    def test_terms_add_up_to_the_step_and_the_device(self, plans):
        info = _plans.terms_info(plans, (1, 3))
        for place, seconds, gib in zip((0, 2), info.seconds, info.gib, strict=True):
            assert sum(seconds.values()) == pytest.approx(plans[place].step_time_s)
            assert sum(gib.values()) * 2**30 == pytest.approx(plans[place].memory_bytes)

    def test_all_are_plain_figures(self, plans):
        for figure in (figures.plans(plans), figures.plan_terms(plans, 1, 2), figures.plan_rejections(plans)):
            assert len(figure.data) > 0

    def test_the_words_name_the_best(self, plans):
        assert figures.plans_text(plans).startswith("small fits on 8 devices")


class TestTraining:
    def test_the_button_trains_a_small_job_with_the_axes_of_the_chosen_plan(self, planner, runtime):
        started = []
        planner.on_train = lambda found, run: started.append(run)
        axes = {"data": 2, "tensor": 2, "pipeline": 2}
        planner.set_trait("fix", {**axes, "micro_batch": 2, "schedule": "1f1b"})
        planner.screen.train.click()
        (run,) = runtime.known
        assert started == [run]
        assert run.job.strategy.shape(run.job.world_size) == axes
        shown = planner.screen.trained
        assert f"Run {run.name} trains gpt-nano with data 2 · tensor 2 · pipeline 2." in shown.said.value
        assert (
            "directly on this machine, which cannot emulate clusters: these runs never run."
            in shown.notes.value
        )
        assert not planner.screen.train.disabled
        assert "In the plan, the pipeline axis costs the most time" in shown.costs.value
        assert "as predicted" in shown.costs.value  # at once
        assert "pipeline 2 × data 2 × tensor 2. In a predicted step" in shown.mesh.words.value

    def test_each_plan_keeps_its_run(self, planner, runtime):
        planner.set_trait("fix", {"data": 2, "tensor": 2, "pipeline": 2, "schedule": "1f1b"})
        shown = planner.screen.trained
        planner.screen.train.click()
        first = shown.said.value
        planner.chosen = 2 if planner.chosen == 1 else 1
        assert (shown.said.value, shown._of_run.layout.display) == ("", "none")
        planner.screen.train.click()
        runtime.known[0].state = "completed"
        assert shown.said.value not in {"", first}
        assert "ranks are starting" in shown.status.value  # nothing is left of the first run
        planner.chosen = 2 if planner.chosen == 1 else 1
        assert (shown.said.value, shown._of_run.layout.display) == (first, None)
        assert "has ended" in shown.status.value
        planner.weights = {"headroom": 1.0}
        planner.global_batch *= 2
        assert shown.said.value == ""  # another question

    def test_a_second_press_stops_the_first_job(self, planner, runtime):
        for _ in range(2):
            planner.screen.train.click()
        first, second = runtime.known
        assert (first.state, second.state) == ("stopped", "running")

    def test_a_launch_that_is_refused_says_why_until_the_next_press(self, planner, runtime, monkeypatch):
        def refused(*_, **__):
            raise LaunchError("the job does not fit")

        with monkeypatch.context() as patched:
            patched.setattr("shardscope.runtime.launch", refused)
            planner.screen.train.click()
        said = planner.screen.trained.said
        assert "No small version of this plan can be trained: the job does not fit." in said.value
        planner.screen.train.click()
        assert said.value.startswith('<div class="ss-words" role="status">Run ')

    def test_memory_and_messages_are_recorded_in_the_step_that_is_not_counted(self, planner, runtime):
        planner.screen.train.click()
        record = runtime.known[0].job.record
        assert (record.memory_first, record.messages_first) == (1, 1)

    def test_a_plan_that_no_job_corresponds_to_says_why_on_screen(self, planner, runtime, monkeypatch):
        def refused(*_, **__):
            raise SpecError("there is no job with these axes; use other ones")

        monkeypatch.setattr(type(planner.plans), "rehearsal", refused)
        planner.screen.train.click()
        assert (
            "No small version of this plan can be trained: there is no job with these axes"
            in planner.screen.trained.said.value
        )
        assert not runtime.known
        assert not planner.screen.train.disabled
