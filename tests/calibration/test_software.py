"""Software: chosen by name, alias or layout; it selects constants and memory, and every answer names it."""

from __future__ import annotations

import math
from functools import partial

import pytest

import shardscope as ss
from published.tables.sharded import sharded
from shardscope.analytic.memory import FRAMEWORKS
from shardscope.calibration.calibration import catalogue
from shardscope.calibration.effects import row_noise
from shardscope.calibration.software import SOFTWARE, assumed_software, software_of
from shardscope.errors import SpecError
from shardscope.planner import SearchAxes
from shardscope.spec.layout import searched_schedules

CLUSTER = ss.Cluster.of("a100-80gb")
LAYOUT = ss.Layout(data=8, zero=3, global_batch=8)
EVERYTHING = SearchAxes(
    schedule=searched_schedules(), zero=(0, 1, 2, 3), zero_in_pipelines=(0, 1, 2, 3), pipeline=None, context=None,
    offload=("none",), shard=("all", "node"),
)  # fmt: skip
"""A search space that names all axes which software limits, so that none of them is limited."""


def test_all_software_has_a_memory_model_and_all_calibrations_name_their_software() -> None:
    assert all(each.memory in FRAMEWORKS for each in SOFTWARE.values())
    assert all(one.software in SOFTWARE for one in catalogue())


def test_software_is_found_by_its_aliases() -> None:
    assert software_of("Megatron-LM").name == "megatron-core"
    assert software_of("NeMo").name == "nemo"
    assert software_of("fsdp").name == "fsdp2"


def test_a_layout_suggests_its_software() -> None:
    assert assumed_software(LAYOUT).software.name == "fsdp2"
    assert assumed_software(ss.Layout(tensor=8)).software.name == "megatron-core"
    assert assumed_software(ss.Layout(zero=3, offload="states")).software.name == "deepspeed"


def test_unknown_software_is_refused() -> None:
    with pytest.raises(SpecError, match="software='jax' is not known.*megatron-core"):
        ss.predict("llama-2-7b", CLUSTER, LAYOUT, software="jax")


def test_every_answer_names_the_software_and_says_when_it_is_assumed() -> None:
    assumed = ss.predict("llama-2-7b", CLUSTER, LAYOUT)
    given = ss.predict("llama-2-7b", CLUSTER, LAYOUT, software="llm-foundry")
    for text in (repr(assumed), assumed._repr_html_(), str(assumed.to_dict())):
        assert "fsdp2" in text
    assert "is assumed because of zero=3" in repr(assumed)
    assert "assumed" not in repr(given)
    assert given.calibration.name == "a100-fsdp"


def test_software_that_was_not_measured_widens_the_interval_and_says_so() -> None:
    measured = ss.predict("llama-2-7b", CLUSTER, LAYOUT, software="llm-foundry")
    elsewhere = ss.predict("llama-2-7b", CLUSTER, LAYOUT, software="torchtitan")
    other = ss.predict("llama-2-7b", ss.Cluster.of("b200"), LAYOUT, software="deepspeed")
    assert "on other clusters of a100-80gb" in elsewhere.calibration.note
    assert "was never measured on b200" in other.calibration.note
    widths = [each.interval.high / each.interval.low for each in (measured, elsewhere, other)]
    assert max(widths[:2]) < widths[2]
    assert "90% interval" in repr(other)


def test_constants_of_old_and_new_releases_differ() -> None:
    """As measured: NVIDIA's recipes are faster than Megatron-Core, and DeepSpeed 0.5.9 than the release before."""
    tensor = ss.Layout(data=8, tensor=8, zero=1, global_batch=64, sequence_parallel=True)
    cluster = ss.Cluster.of("h100-80gb", nodes=8)
    sharded = ss.Layout(data=64, zero=3, global_batch=64)
    for slow, fast, layout in (
        ("megatron-core", "nemo", tensor),
        ("deepspeed-0.5", "deepspeed", sharded),
    ):
        before, after = (ss.predict("llama-2-13b", cluster, layout, software=name) for name in (slow, fast))
        assert after.step_time_s < before.step_time_s


def test_predictions_for_deepspeed_say_how_few_of_its_steps_were_measured() -> None:
    for device in ("a100-40gb", "h100-80gb"):
        new, old = (ss.Calibration.of(device, name).note for name in ("deepspeed-0.5.9", "deepspeed-0.5"))
        assert "of DeepSpeed since 0.5.9, only three steps of October 2021 were measured" in new
        assert "October" not in old
    assert len(sharded()["DeepSpeed 0.5.9, A100"]) == 3


def test_rows_deviate_less_where_one_vendor_tunes_all_runs() -> None:
    assert row_noise("nemo") < row_noise("fsdp2") < row_noise("megatron-deepspeed")
    narrow, wide = (ss.Calibration.of("a100-40gb", name) for name in ("nemo", "megatron-deepspeed"))
    assert narrow.quantiles["95"] == pytest.approx(math.exp(1.645 * row_noise("nemo")))
    assert wide.quantiles["5"] < narrow.quantiles["5"]


def test_software_selects_the_memory_model() -> None:
    layout = ss.Layout(data=8, zero=1, global_batch=16)
    megatron, deepspeed = (
        ss.predict("llama-2-7b", CLUSTER, layout, software=name) for name in ("megatron-core", "deepspeed")
    )
    assert megatron.memory["stage 0"]["gradients"].value == 2 * deepspeed.memory["stage 0"]["gradients"].value


def test_a_plan_takes_software_and_predicts_like_its_layouts() -> None:
    model = ss.Model.transformer(layers=4, hidden=1024, heads=8, vocab=32000, seq=1024)
    plans = ss.plan(model, CLUSTER, global_batch=32, software="fsdp2", fix={"zero": 3})
    alone = ss.predict(model, CLUSTER, plans.best.layout, software="fsdp2")
    assert plans.best.step_time_s == pytest.approx(alone.step_time_s)
    assert plans.best.memory_bytes == pytest.approx(alone.peak_bytes)
    assert "software fsdp2" in plans.caveat
    assert ss.plan(model, CLUSTER, global_batch=32, fix={"zero": [2, 3]}).to_dict()["software"] == "fsdp2"


@pytest.mark.parametrize(
    "software", ["megatron-core", "megatron-deepspeed", "deepspeed", "torchtitan", "llm-foundry"]
)
def test_a_plan_has_only_what_its_software_ships(software: str) -> None:
    model = ss.Model.transformer(layers=8, hidden=1024, heads=8, vocab=32000, seq=1024)
    found = ss.plan(model, CLUSTER, global_batch=32, software=software, top=None)
    shipped = software_of(software).shipped
    assert len(found) > 20
    assert {shipped.lacks(found.layout(int(at)), model) for at in found.order[::7]} == {()}
    assert found.considered == found.valid + sum(
        count for reason, count in found.rejected.items() if reason not in {"does not fit", "beaten"}
    )
    everything = ss.plan(model, CLUSTER, global_batch=32, software=software, top=None, space=EVERYTHING)
    fitting = [at for at in everything.order.tolist() if not shipped.lacks(everything.layout(at), model)]
    assert len(found.order) == len(fitting)
    assert found.best.step_time_s == pytest.approx(float(everything.step_time_s[fitting].min()))


@pytest.mark.parametrize(
    ("software", "offload", "zero"),
    [("fsdp2", "states", 2), ("deepspeed", "all", 3), ("deepspeed", "optimizer", 1)],
)
@pytest.mark.parametrize("ranks", [1, 8])
def test_offloading_is_searched_only_from_the_zero_stage_that_ships_it(
    software: str, offload: str, zero: int, ranks: int
) -> None:
    model = ss.Model.transformer(layers=8, hidden=1024, heads=8, vocab=32000, seq=1024)
    cluster = ss.Cluster.of("a100-80gb", nodes=1, per_node=ranks)
    found = ss.plan(model, cluster, global_batch=32, software=software, fix={"offload": offload}, top=None)
    layouts = [found.layout(int(at)) for at in found.order]
    assert {software_of(software).shipped.lacks(layout) for layout in layouts} == {()}
    assert min(layout.zero for layout in layouts) == zero
    assert found.rejected["ZeRO with offload"]
    assert found.considered == found.valid + sum(
        count for reason, count in found.rejected.items() if reason not in {"does not fit", "beaten"}
    )
    asked = ss.plan(
        model, cluster, global_batch=32, software=software, fix={"offload": offload, "zero": zero - 1}
    )
    assert f"does not support offload={offload!r} below zero={zero}" in asked.caveat


def test_activations_are_offloaded_only_where_deepspeed_recomputes_all_layers() -> None:
    model = ss.Model.transformer(layers=8, hidden=1024, heads=8, vocab=32000, seq=1024)
    cluster, shipped = ss.Cluster.of("a100-80gb", nodes=1), software_of("deepspeed").shipped
    fix = {"zero": 3, "pipeline": 1, "context": 1}
    some = {"offload": ["states", "activations", "all"]}
    search = partial(ss.plan, model, cluster, global_batch=32, software="deepspeed", top=None)
    found, every = (
        search(fix=fix | some),
        search(fix=fix | some | {"recompute": ["none", "selective", "full"]}),
    )
    fitting = [each.layout for each in every if not shipped.lacks(each.layout)]
    assert len(found) == len(fitting) < len(every)
    assert {each.layout for each in found} == {*fitting}
    lost = sum(count for name, count in found.rejected.items() if name not in {"does not fit", "beaten"})
    assert (found.considered - found.valid, len(found)) == (lost, found.valid)
    assert found.rejected["recomputation with offload"] == len(every) - len(found)
    left_out = next(each.layout for each in every if shipped.lacks(each.layout))
    assert "without recompute='full' of all layers" in str(found.why(left_out))
    asked = search(fix=fix | {"offload": "all", "recompute": "none"})
    assert "does not support offload='all' without recompute='full' of all layers" in asked.caveat


def test_a_plan_says_what_the_software_does_not_ship_and_what_that_would_save() -> None:
    cluster = ss.Cluster.of("a100-80gb", nodes=16)
    limited = ss.plan("gpt3-175b", cluster, global_batch=128, software="megatron-core", fix={"pipeline": 8})
    everything = ss.plan("gpt3-175b", cluster, global_batch=128, software="any", fix={"pipeline": 8})
    assert limited.beyond is not None
    assert limited.beyond.step_time_s == everything.best.step_time_s
    missing, saved = limited.beyond.lacking, 1 - everything.best.step_time_s / limited.best.step_time_s
    assert "schedule" in missing
    told = f"only settings that Megatron-Core supports were searched; {missing}, which it does not support, would make"
    assert f"{told} the step {saved:.0%} shorter" in repr(limited)
    assert f"Megatron-Core does not support {missing}; software='megatron-core' searches only" in repr(
        everything
    )
    assert f"does not support {missing}; name the axis in fix" in limited.why(limited.beyond.layout)
    by_alias = ss.plan("gpt3-175b", cluster, global_batch=128, software="megatron", fix={"pipeline": 8})
    assert by_alias.beyond == limited.beyond
    asked = ss.plan(
        "gpt3-175b", cluster, global_batch=128, software="megatron-core",
        fix={"pipeline": 8, "schedule": limited.beyond.layout.schedule},
    )  # fmt: skip
    assert asked.best.layout.schedule == limited.beyond.layout.schedule
    assert asked.why(asked.best.layout) == "it is plan 1 of the table"
    assert limited.limits is not None
    everywhere = SearchAxes(**dict(limited.limits.wider))
    assert ss.plan("gpt3-175b", cluster, global_batch=128, space=everywhere).limits is None


@pytest.mark.parametrize(
    ("device", "nodes", "batch", "fix"),
    [
        ("a100-80gb", 4, 64, {}),
        ("a100-80gb", 1, 8, {"zero": [1, 2, 3], "tensor": [1, 2], "pipeline": 1}),
        ("a100-40gb", 1, 8, {"offload": ["none", "all"], "tensor": [1, 8]}),
    ],
)
def test_each_layout_of_a_plan_gets_the_software_that_it_suggests(
    device: str, nodes: int, batch: int, fix: dict[str, object]
) -> None:
    cluster = ss.Cluster.of(device, nodes=nodes)
    plans = ss.plan("llama-2-13b", cluster, global_batch=batch, top=None, fix=fix)
    assert len(plans.software) > 1
    firsts = {plan.software: plan for plan in reversed(list(plans) if fix else [plans[0], plans[-1]])}
    for software, plan in firsts.items():
        alone = ss.predict("llama-2-13b", cluster, plan.layout)
        assert (alone.software, alone.fits) == (software, True)
        assert plan.step_time_s == pytest.approx(alone.step_time_s)
        assert plan.memory_bytes == pytest.approx(alone.peak_bytes)
    first, second = plans[0], plans[len(plans) - 1]
    assert plans.explain(1, len(plans)).time == pytest.approx((first.step_time_s, second.step_time_s))


def test_a_whole_plan_with_offload_predicts_like_its_layouts() -> None:
    plans = ss.plan("llama-3-70b", CLUSTER, top=1)
    alone = ss.predict("llama-3-70b", CLUSTER, plans.best.layout)
    assert plans.best.software == alone.software == "deepspeed"
    assert plans.best.step_time_s == pytest.approx(alone.step_time_s)


def test_a_given_calibration_of_other_software_is_named() -> None:
    found = ss.predict("llama-2-7b", CLUSTER, LAYOUT, ss.Calibration.of("a100-megatron"), software="fsdp2")
    assert "measured with megatron-deepspeed" in found.calibration.note
    same = ss.predict("llama-2-7b", CLUSTER, LAYOUT, ss.Calibration.of("a100-megatron"))
    assert found.uncertainty.between > 1.2 * same.uncertainty.between


def test_a_given_calibration_of_software_with_the_same_constants_is_not_widened() -> None:
    mine = ss.Calibration.of("h100-80gb", "nemo")
    layout = ss.Layout(data=8, zero=1, global_batch=8)
    nemo, bridge = (
        ss.predict("llama-2-7b", ss.Cluster.of("h100-80gb"), layout, mine, software=name)
        for name in ("nemo", "megatron-bridge")
    )
    assert bridge.calibration == mine.replace(software="megatron-bridge")
    assert bridge.interval == nemo.interval
    assert bridge.peak_bytes > nemo.peak_bytes, "NeMo accumulates gradients in 16 bits"


def test_releases_of_pytorch_before_2_11_attend_more_slowly_on_hopper_alone() -> None:
    for device, ratio in (("h100-80gb", 1.05), ("a100-80gb", 1.0)):
        cluster, layout = ss.Cluster.of(device, nodes=4), ss.Layout(data=32, zero=3, global_batch=32)
        model = ss.Model.of("llama-3-8b").replace(seq=32768)
        old, new = (
            ss.predict(model, cluster, layout, software=name).step_time_s for name in ("fsdp2-2.10", "fsdp2")
        )
        assert (old > ratio * new) if ratio > 1 else (old == pytest.approx(new))


def test_the_software_of_a_calibration_may_be_an_alias() -> None:
    mine = ss.Calibration(name="mine", software="megatron")
    assert mine.software == "megatron-core"
    assert ss.predict("llama-2-7b", CLUSTER, LAYOUT, mine).software == "megatron-core"
    with pytest.raises(SpecError, match="software='jax' is not known"):
        ss.Calibration(name="mine", software="jax")


def test_software_has_no_effect_on_this_machine() -> None:
    with pytest.raises(SpecError, match="no effect on this machine"):
        ss.predict(ss.Job(model="mlp", data="digits"), software="fsdp2")
