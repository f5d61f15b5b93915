"""Full recomputation of the first layers of each stage: between none and all, in time, memory and FLOPs."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import shardscope as ss
from shardscope.analytic.compute.flops import forward_flops, hardware_flops
from shardscope.analytic.layouts import Layouts
from shardscope.analytic.memory import (
    FRAMEWORKS,
    RECIPES,
    activation_bytes_per_layer,
    device_memory,
    stage_memory,
)
from shardscope.analytic.memory.explain import memory_term
from shardscope.analytic.memory.offload import offload_traffic
from shardscope.analytic.recomputation import recomputed_in_model
from shardscope.calibration.calibration import Calibration
from shardscope.errors import SpecError
from shardscope.prediction.step import StepParts, step_time, time_term
from shardscope.spec.cluster import Cluster
from shardscope.spec.layout import Layout
from shardscope.spec.model import Mixture, Transformer

MODEL = Transformer(layers=24, hidden=2048, heads=16, vocab=51200, seq=1024, tied=False)
SPARSE = MODEL.replace(mixture=Mixture(experts=8, active=2, ffn=8192, dense_layers=3))
CLUSTER, CALIBRATION = Cluster.of("a100-80gb", nodes=8), Calibration.of("a100-megatron")
FULL = Layout(
    tensor=4, pipeline=2, data=8, global_batch=64, micro_batch=2, recompute="full", sequence_parallel=True
)

layouts = st.builds(
    lambda shape, micro, zero, offload, sequence: Layout(
        data=2, tensor=2, micro_batch=micro, global_batch=2 * micro * 8, zero=zero, recompute="full", offload=offload,
        sequence_parallel=sequence, pipeline=shape[0], schedule=shape[1], virtual_stages=shape[2],
    ),
    st.sampled_from([(1, "1f1b", 1), (4, "1f1b", 1), (5, "gpipe", 1), (4, "interleaved", 3), (4, "zbv", 2)]),
    st.sampled_from([1, 4]), st.sampled_from([0, 1, 2, 3]), st.sampled_from(["none", "states", "activations"]),
    st.booleans(),
)  # fmt: skip


def counted(layout: Layout, *counts: int) -> Layouts:
    return Layouts.of([layout.replace(recompute_layers=count) for count in counts])


def of_stage(model: Transformer, layout: Layout) -> int:
    return -(-model.layers // (layout.pipeline * layout.virtual_stages))


@settings(max_examples=40, deadline=None)
@given(st.sampled_from([MODEL, SPARSE]), layouts)
def test_all_layers_by_number_are_all_layers_to_the_last_bit(model: Transformer, layout: Layout) -> None:
    table = counted(layout, 0, of_stage(model, layout), 999)
    times, held = step_time(model, table, CLUSTER, CALIBRATION), device_memory(model, table)
    for column in (*times, *held):
        assert column[0] == column[1] == column[2]


@settings(max_examples=40, deadline=None)
@given(st.sampled_from([MODEL, SPARSE]), layouts)
def test_more_layers_take_more_time_and_less_memory(model: Transformer, layout: Layout) -> None:
    table = counted(layout, *range(1, of_stage(model, layout) + 1))
    held, times = device_memory(model, table).total, step_time(model, table, CLUSTER, CALIBRATION).total
    none = Layouts.of([layout.replace(recompute="none")])
    held = np.concatenate([device_memory(model, none).total, held])
    assert (np.diff(held) <= 1e-3 * held[0]).all()  # offloaded layers that run are of average size
    if layout.offload == "none":  # recomputed layers save less, which need not travel to the host
        times = np.concatenate([step_time(model, none, CLUSTER, CALIBRATION).total, times])
        assert (np.diff(times) >= -1e-12 * times[0]).all()


def test_a_layer_frees_what_it_saves_for_every_micro_batch_in_flight() -> None:
    """Only the last layer also adds a buffer for its recomputed activations, which earlier ones find freed."""
    layout = FULL.replace(pipeline=4, data=4, micro_batch=4, global_batch=256)
    whole, entry = (
        float(activation_bytes_per_layer(
            MODEL, micro_batch=4, tensor=4, sequence_parallel=True, recompute=kind, flash_attention=True,
            recipe=RECIPES["bf16-mixed"], framework=FRAMEWORKS["megatron-core"],
        ))
        for kind in ("none", "full")
    )  # fmt: skip
    rows = [
        layout.replace(recompute="none"),
        *(layout.replace(recompute_layers=count) for count in range(1, 7)),
    ]
    held = [stage_memory(MODEL, row) for row in rows]
    freed = -np.diff([parts.total[0] for parts in held])
    assert freed[:-1] == pytest.approx(4 * (whole - entry))
    buffers = [parts.buffers[0] for parts in held]
    assert len({*buffers[:-1]}) == 1
    assert freed[-1] == pytest.approx(4 * (whole - entry) - (buffers[-1] - buffers[-2]))
    assert -np.diff([parts.activations[3] for parts in held]) == pytest.approx(whole - entry)


def test_time_and_flops_grow_by_a_forward_pass_of_each_layer() -> None:
    parts = [step_time(MODEL, counted(FULL, count), CLUSTER, CALIBRATION) for count in (3, 6, 12)]
    assert [float(part.recompute[0] / parts[-1].recompute[0]) for part in parts] == pytest.approx(
        [0.25, 0.5, 1]
    )
    assert [recomputed_in_model(FULL.replace(recompute_layers=n), 24) for n in (3, 12, 0)] == [6, 24, 24]
    assert recomputed_in_model(FULL.replace(pipeline=5, recompute_layers=5), 24) == 24
    assert recomputed_in_model(FULL.replace(recompute="none"), 24) == 0
    assert hardware_flops(MODEL, 1, recompute="full", layers=6) == pytest.approx(
        3 * forward_flops(MODEL) + (forward_flops(MODEL) - 2 * MODEL.seq * MODEL.hidden * MODEL.vocab) / 4
    )
    predicted = ss.predict(MODEL, CLUSTER, FULL.replace(recompute_layers=3), CALIBRATION)
    assert predicted.mfu < predicted.hfu < predicted.mfu * 4 / 3


@settings(max_examples=20, deadline=None)
@given(st.lists(st.tuples(layouts, st.integers(0, 7)), min_size=1, max_size=5))
def test_a_table_of_layouts_takes_what_each_takes_alone(rows: list[tuple[Layout, int]]) -> None:
    many = [layout.replace(recompute_layers=count) for layout, count in rows]
    together = step_time(SPARSE, Layouts.of(many * (300 // len(many) + 1)), CLUSTER, CALIBRATION)
    held = device_memory(SPARSE, Layouts.of(many))
    for at, row in enumerate(many):
        alone = step_time(SPARSE, Layouts.of([row]), CLUSTER, CALIBRATION)
        for name in StepParts._fields:
            assert getattr(together, name)[at] == pytest.approx(float(getattr(alone, name)[0]), rel=1e-12)
        assert held.total[at] == device_memory(SPARSE, Layouts.of([row])).total[0]


def test_offloaded_weights_travel_again_only_for_recomputed_layers() -> None:
    table = counted(FULL.replace(offload="states", global_batch=16), 3, 0)
    numbers = np.array([1e9, 1e9])
    moved = offload_traffic(table, parameters=numbers, owned=numbers, saved=numbers * 0, layers=12).to_device
    assert moved.tolist() == pytest.approx([2e9 * (2 + 3 / 12), 2e9 * 3])


@pytest.mark.parametrize("count", [1, 4, 11])
@pytest.mark.parametrize("schedule", ["1f1b", "interleaved", "zbv"])
def test_a_simulated_step_takes_the_predicted_time(schedule: str, count: int) -> None:
    calibration = CALIBRATION.replace(collective_s=0.0)
    virtual = {"1f1b": 1, "interleaved": 3, "zbv": 2}[schedule]
    layout = Layout(
        data=2, tensor=4, pipeline=2, global_batch=64, schedule=schedule, virtual_stages=virtual, recompute="full",
        recompute_layers=count,
    )  # fmt: skip
    cluster = Cluster.of("a100-80gb", nodes=2)
    predicted, simulated = (
        call(MODEL, cluster, layout, calibration=calibration) for call in (ss.predict, ss.simulate)
    )
    assert simulated.step_time_s == pytest.approx(predicted.step_time_s, rel=2e-2)
    assert simulated.time["recomputation"].value == pytest.approx(
        predicted.time["recomputation"].value, rel=1e-2
    )


def test_terms_say_how_many_layers_are_recomputed() -> None:
    layout = FULL.replace(recompute_layers=5)
    time = time_term(MODEL, layout, CLUSTER, CALIBRATION)
    assert (time["recomputation"].inputs["recomputed layers"], time["recomputation"].inputs["layers"]) == (
        5,
        12,
    )
    assert sum(part.value for part in time.parts) == pytest.approx(time.value)
    saved = memory_term(MODEL, layout)["stage 0"]["activations"]["saved by layers"]
    told = saved.inputs
    stored = told["bytes per stored layer"] * (told["layers"] - told["recomputed layers"])
    entries = told["recomputed layers"] * 2 * told["bs"] * told["h"] / told["t′"]
    assert saved.value == pytest.approx(told["micro-batches in flight"] * (stored + entries))
    assert "recomputed layers × 2bsh / t′" in saved.formula


def test_numbers_without_an_effect_are_refused_with_the_way_out() -> None:
    for kind in ("none", "selective"):
        with pytest.raises(SpecError, match=r"recompute_layers=3 has no effect .* use recompute='full'"):
            FULL.replace(recompute=kind, recompute_layers=3).check(MODEL)
    mixed = Cluster.mixed(Cluster.of("a100-80gb", nodes=4), Cluster.of("h100", nodes=4))
    with pytest.raises(
        SpecError, match="recompute_layers=3 cannot be combined with groups of different devices"
    ):
        FULL.replace(recompute_layers=3).check(MODEL, mixed)
    with pytest.raises(
        SpecError, match="recompute_layers=3 cannot be combined with groups of different devices"
    ):
        ss.plan(MODEL, mixed, fix={"recompute_layers": [0, 3]})
    with pytest.raises(SpecError, match=r"recompute_layers=3 has no effect .* use recompute='full'"):
        ss.plan(MODEL, CLUSTER, fix={"recompute": ["none", "selective"], "recompute_layers": 3})
