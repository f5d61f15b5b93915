"""What the answer can be asked: rows, fronts, other objectives, reasons."""

from __future__ import annotations

import json
import re

import pytest

from planner.brute import CALIBRATION, machine, small_model
from shardscope.errors import SpecError
from shardscope.planner import plan
from shardscope.planner.explain import explain
from shardscope.planner.table import NO_BREAK, days_text, dollars_text, table_rows
from shardscope.spec.layout import Layout
from shardscope.spec.units import work_text


@pytest.fixture(scope="module")
def plans():
    return plan(
        small_model(),
        machine(nodes=2, per_node=4),
        global_batch=16,
        fix={"offload": "none"},
        calibration=CALIBRATION,
    )


def test_the_frame_is_the_ranked_table(plans):
    frame = plans.frame
    assert len(frame) == len(plans) == 20
    assert list(frame.index) == list(range(1, 21))
    assert frame["step_time_s"].is_monotonic_increasing
    first = frame.iloc[0]
    assert (first["tensor"], first["step_time_s"]) == (plans.best.layout.tensor, plans.best.step_time_s)
    tokens = 16 * plans.setting.model.seq
    assert first["tokens_per_s"] == pytest.approx(tokens / first["step_time_s"])
    assert first["dollars"] == pytest.approx(first["step_time_s"] / 3600 * 8 * 2.0)
    assert first["headroom_bytes"] == pytest.approx(16e9 - first["memory_bytes"])


def test_rows_can_be_taken_by_place(plans):
    assert plans[-1].rank == 20
    assert [row.rank for row in plans] == list(range(1, 21))
    assert [row.rank for row in plans[:3]] == [1, 2, 3]
    assert [row.rank for row in plans[-1:-4:-1]] == [20, 19, 18]
    with pytest.raises(IndexError):
        _ = plans[20]


def test_another_objective_needs_no_search(plans):
    roomy = plans.by("headroom")
    room = [row.headroom_bytes for row in roomy]
    assert room == sorted(room, reverse=True)
    assert room[0] == max(plans.headroom_bytes)
    assert plans.best.step_time_s == min(plans.step_time_s)


def test_differences_of_terms_add_up_to_the_difference_in_time(plans):
    told = plans.explain(1, 12)
    assert told.term.value == pytest.approx(plans[11].step_time_s - plans[0].step_time_s, rel=1e-9)
    gains = [abs(each.gain_s) for each in told.differences]
    assert gains == sorted(gains, reverse=True)
    assert told.sentences[0].startswith("Plan 1 takes")
    assert "faster" in told.sentences[0]
    assert told.sentences[0].endswith(
        f"({work_text(plans.best.layout.global_batch, plans.setting.model.seq)})."
    )
    assert "slower" in plans.explain(12, 1).sentences[0]
    assert len(told.sentences) == len(told.differences) + 2


def test_explaining_names_settings_that_differ(plans):
    told = plans.explain(1, 12)
    assert any(each.because for each in told.differences)
    for each in told.differences:
        for name in each.because:
            assert getattr(told.first, name) != getattr(told.second, name)


def test_a_rank_that_is_not_there_is_refused(plans):
    with pytest.raises(SpecError, match="second=0 is not a position in the ranking"):
        plans.explain(1, 0)
    for use in (plans.ranked, plans.stage_layers, plans.rehearsal, plans.trainer_config):
        with pytest.raises(SpecError, match="rank=True is not a position in the ranking"):
            use(True)


class TestWhy:
    def test_a_rule_that_is_broken(self, plans):
        assert "does not divide heads=4" in plans.why(Layout(tensor=8, global_batch=16))

    def test_the_best_knows_that_it_is(self, plans):
        assert plans.why(plans.best.layout) == "it is plan 1 of the table"

    def test_a_slower_one_hears_who_beats_it_and_by_what(self, plans):
        told = plans.why(plans.best.layout.replace(recompute="full"))
        assert "it is beaten" in told or "slower than the best" in told
        assert "faster (global batch " in told
        assert " instead of " in told

    def test_as_many_layers_as_a_stage_has_are_all_of_them(self):
        fix = {"recompute": "full", "schedule": "1f1b", "pipeline": 2, "tensor": 1, "offload": "none"}
        found = plan(small_model(), machine(), global_batch=16, calibration=CALIBRATION, fix=fix)
        best = found.best.layout
        assert best.recompute_layers == 0
        for count in (4, 5):
            assert found.why(best.replace(recompute_layers=count)) == "it is plan 1 of the table"
        assert found.why(best.replace(recompute_layers=3)) != "it is plan 1 of the table"

    def test_stages_that_differ_in_layers_are_what_the_planner_leaves_out(self, plans):
        told = plans.why(
            Layout(data=2, pipeline=4, schedule="interleaved", virtual_stages=2, global_batch=16)
        )
        assert told.startswith("it is ")  # 8 layers in 8 stages
        uneven = plan(small_model(layers=12), machine(nodes=2), global_batch=16, calibration=CALIBRATION)
        told = uneven.why(
            Layout(data=2, pipeline=4, schedule="interleaved", virtual_stages=2, global_batch=16)
        )
        assert "pipeline=4 x virtual_stages=2 = 8 stages do not divide the 12 layers" in told

    def test_a_step_of_another_size_is_not_compared(self, plans):
        assert plans.why(plans.best.layout.replace(global_batch=32)).startswith(
            "global_batch=32 differs from the table's 16"
        )

    def test_one_that_does_not_fit_hears_by_how_much_and_what_helps(self):
        small = plan(
            small_model(), machine(per_node=4, memory_gb=0.085), global_batch=16, calibration=CALIBRATION
        )
        told = small.why(Layout(data=4, global_batch=16, micro_batch=4))
        assert re.search(r"it needs [\d.]+ MiB too much: [\d.]+ MiB on a device with", told)
        assert "would help" in told

    def test_one_that_fits_if_it_recomputes_some_layers_says_how_many(self):
        cluster = machine(nodes=2, per_node=2, memory_gb=0.09)
        plans = plan(small_model(seq=1024), cluster, global_batch=8, calibration=CALIBRATION, top=None)
        in_part = next(row.layout for row in plans if row.layout.recompute_layers)
        told = plans.why(in_part.replace(recompute="none", recompute_layers=0))
        assert told.endswith(f"recompute='full' with recompute_layers={in_part.recompute_layers} would fit")


def test_rows_say_how_many_layers_of_a_stage_are_recomputed():
    cluster = machine(nodes=1, per_node=4)
    fix = {"recompute": "full", "recompute_layers": 3, "schedule": "1f1b", "pipeline": 2, "tensor": 1}
    plans = plan(small_model(), cluster, global_batch=16, calibration=CALIBRATION, fix=fix)
    assert set(plans.frame["recompute_layers"]) == {3}
    header, rows = table_rows(plans)
    assert {row[header.index("recompute")] for row in rows} == {f"full,{NO_BREAK}3{NO_BREAK}of{NO_BREAK}4"}
    assert "full recomputation of 3 layers per stage" in repr(plans)
    other = plans.best.layout.replace(recompute_layers=0)
    told = str(explain((plans.setting, plans.setting), plans.best.layout, other, ("one", "other")))
    assert "(recomputed layers 3 instead of all)" in told
    plain = plans.best.layout.replace(recompute="none", recompute_layers=0)
    told = str(explain((plans.setting, plans.setting), plain, plans.best.layout, ("one", "other")))
    assert "(recomputation none instead of full" in told
    saved = next(line for line in told.splitlines() if line.startswith("Recomputation of activations"))
    assert re.fullmatch(
        r"Recomputation of activations: [\d.]+ µs less \(recomputation none instead of full\)\.", saved
    )
    assert "recompute_layers" not in told


@pytest.fixture(scope="module")
def nothing():
    model = small_model(layers=32, hidden=2048, heads=16)
    return plan(model, machine(per_node=2, memory_gb=3.0, host=1e6), global_batch=8, calibration=CALIBRATION)


class TestNothingFits:
    def test_it_says_what_comes_closest_and_what_would_help(self, nothing):
        assert len(nothing) == 0
        assert "the closest, " in nothing.problem
        assert "GiB of 2.79 GiB for tensors, " in nothing.problem
        assert "too much" in nothing.problem
        assert "a layout would fit" in nothing.problem
        assert nothing.problem in nothing._repr_html_().replace("&#x27;", "'")

    def test_the_nodes_it_names_are_the_fewest_doubled(self, nothing):
        nodes = int(nothing.problem.split(" nodes (")[0].split()[-1])
        for count, fits in ((nodes, True), (nodes // 2, False)):
            cluster = nothing.setting.cluster.replace(nodes=count)
            found = plan(nothing.setting.model, cluster, global_batch=8, calibration=CALIBRATION, top=1)
            assert bool(len(found)) is fits

    def test_asking_for_the_best_tells_why_there_is_none(self, nothing):
        with pytest.raises(SpecError, match="the closest"):
            _ = nothing.best

    def test_a_batch_that_no_layout_can_have_is_told_from_memory(self):
        none = plan(small_model(), machine(), global_batch=8, fix={"tensor": 3}, calibration=CALIBRATION)
        assert "no layout of small on 4 devices is valid" in none.problem
        assert "divide" in none.problem


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"objective": "speed"}, "objective='speed' is not known"),
        ({"objective": {"time": -1}}, "weights are finite and at least 0"),
        ({"objective": {"time": "x"}}, "the weight time='x' is not valid"),
        ({"objective": 5}, "objective=5 is not known"),
        ({"objective": {"time": 0}}, "has no weight above 0"),
        ({"global_batch": 0}, "global_batch=0"),
        ({"global_batch": float("nan")}, "global_batch=nan is not a batch size"),
        ({"global_batch": "64"}, "global_batch='64' is not a batch size"),
        ({"cluster": None}, "plan takes a Cluster, got None; write ss.Cluster.of"),
        ({"space": {"tensor": 8}}, "space takes a SearchAxes"),
        ({"calibration": "a100-megatron"}, "write calibration=ss.Calibration.of"),
        ({"top": 0}, "top=0"),
        ({"top": "x"}, "top='x' is not a number of rows; give 1 or more"),
        ({"top": 1.5}, "top=1.5 is not a number of rows"),
        ({"flash_attention": "x"}, "flash_attention='x' is neither True nor False"),
        ({"flash_attention": [True, None]}, "flash_attention=None is neither True nor False"),
        ({"fix": ["tensor"]}, "fix takes a Mapping"),
        ({"precision": "fp4"}, "precision='fp4' is not known"),
        ({"optimizer": "adam"}, "did you mean 'adamw'"),
        ({"model": "gpt9"}, "gpt9"),
    ],
)
def test_bad_input_is_one_sentence(settings, told):
    asked = {"model": small_model(), "cluster": machine(), "calibration": CALIBRATION} | settings
    with pytest.raises(SpecError, match=told) as caught:
        plan(**asked)
    assert "\n" not in str(caught.value)


def test_dollars_need_a_price():
    with pytest.raises(SpecError, match="price_per_device_hour"):
        plan(small_model(), machine(price=None), "dollars", calibration=CALIBRATION)


@pytest.mark.parametrize(
    ("dollars", "told"),
    [
        (2.6, "$2.60"),
        (845e3, "$845 k"),
        (3300, "$3.30 k"),
        (99_960, "$100 k"),
        (7.03e-4, "$0.000703"),
        (3e-6, "$3.0e-06"),
    ],
)
def test_an_amount_has_three_digits(dollars, told):
    assert dollars_text(dollars) == told
    assert days_text(4.1 * 365.25) == "4.10 years"


def test_several_precisions_are_ranked_in_one_table():
    fix = {"offload": "none", "schedule": "1f1b"}
    asked = {"global_batch": 8, "fix": fix, "calibration": CALIBRATION, "top": 10}
    both = plan(small_model(), machine(), precision=["bf16-mixed", "fp32"], **asked)
    each = [plan(small_model(), machine(), precision=name, **asked) for name in ("bf16-mixed", "fp32")]
    assert both.valid == sum(one.valid for one in each)
    times = sorted(row.step_time_s for one in each for row in one)[:10]
    assert [row.step_time_s for row in both] == pytest.approx(times)
    assert both.frame["precision"].iloc[0] in {"bf16-mixed", "fp32"}


def test_what_does_not_hold_of_the_calibration_is_told_wherever_the_plans_are():
    note = "measured on one node only"
    found = plan(
        small_model(), machine(per_node=4), global_batch=16, calibration=CALIBRATION.replace(note=note)
    )
    assert f"calibration test: {note}" in repr(found)
    assert note in found._repr_html_()
    assert (found.to_dict()["calibration"], found.to_dict()["note"]) == ("test", note)


def test_it_goes_to_json_and_its_layouts_back(plans):
    told = json.loads(json.dumps(plans.to_dict()))
    assert Layout(**told["plans"][0]["layout"]) == plans.best.layout
    assert told["considered"] == plans.considered
