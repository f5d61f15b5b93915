"""Factors of per-layer shapes: learnt from rows of several configurations, and part of every prediction."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

import shardscope as ss
from published.one_step import OneStep
from published.rows import published_row
from shardscope.calibration.calibration import Calibration
from shardscope.calibration.choice import calibration_for
from shardscope.calibration.layer_shape import OTHERS, SHAPE_SPREAD, shape_of
from shardscope.calibration.software import SOFTWARE
from shardscope.errors import SpecError
from shardscope.measure.calibrate.rows import Row, predicted_seconds
from shardscope.measure.calibrate.shapes import helpful, learnt, with_factors
from shardscope.spec.cluster import Cluster, Device
from shardscope.spec.layout import Layout
from shardscope.spec.model import Mixture, Transformer

CLUSTER = Cluster.of("a100-80gb", nodes=1)
KNOWN = calibration_for(Device.of("a100-80gb"), SOFTWARE["megatron-deepspeed"])
SETTINGS = {"flash_attention": False, "precision": "fp16-mixed"}
TENSOR_FACTORS = {1: 1.0, 2: 1.15, 4: 0.72}


def model(layers: int) -> Transformer:
    return Transformer(name=f"gpt-{layers}", layers=layers, hidden=2048, heads=16, vocab=51200, seq=1024)


def rows_of(known: Calibration, noise: float = 0.0) -> list[Row]:
    """Rows of a cluster whose layers take `TENSOR_FACTORS` longer than `known` says."""
    random, rows = np.random.default_rng(3), []
    for layers in (12, 16, 24):
        for tensor in TENSOR_FACTORS:
            for pipeline in (1, 2):
                data = 8 // (tensor * pipeline)
                layout = Layout(
                    data=data, tensor=tensor, pipeline=pipeline, global_batch=64, micro_batch=2, **SETTINGS
                )
                rows.append(
                    published_row("made", model(layers), CLUSTER, layout, 1.0, software="megatron-deepspeed")
                )
    true = with_factors(known, {shape_of(r.model, r.layout): TENSOR_FACTORS[r.layout.tensor] for r in rows})
    seconds = predicted_seconds(rows, true) * np.exp(noise * random.normal(size=len(rows)))
    return [replace(row, seconds=float(value)) for row, value in zip(rows, seconds, strict=True)]


def test_factors_of_shapes_are_found_and_predict_configurations_that_were_left_out() -> None:
    rows = rows_of(KNOWN, noise=0.01)
    off = np.log([row.seconds for row in rows]) - np.log(predicted_seconds(rows, KNOWN))
    found = learnt(rows, KNOWN, off, off, np.ones(len(rows)))
    assert list(found.factors.values()) == pytest.approx(list(TENSOR_FACTORS.values()), rel=0.03)
    assert np.abs(found.left_out).mean() < 0.2 * np.abs(off).mean()
    assert found.helps(off)
    shaped = with_factors(KNOWN, found.factors)
    assert predicted_seconds(rows, shaped) == pytest.approx([row.seconds for row in rows], rel=0.05)


def test_a_shape_of_one_configuration_has_no_factor() -> None:
    rows = rows_of(KNOWN)[:2]
    rows[1] = replace(rows[1], layout=rows[0].layout.replace(global_batch=128), model=rows[0].model)
    off = np.array([0.2, 0.2])
    found = learnt(rows, KNOWN, off, off, np.ones(2))
    assert found.factors == {}
    assert not found.helps(off)


def test_the_simulator_has_the_same_factors_as_the_prediction() -> None:
    layout = Layout(data=2, tensor=4, global_batch=16, micro_batch=2, **SETTINGS)
    slow = with_factors(KNOWN, {shape_of(model(12), layout): 1.5})
    fast, found = (ss.predict(model(12), CLUSTER, layout, each) for each in (KNOWN, slow))
    assert 1.2 < found.step_time_s / fast.step_time_s < 1.5
    assert found.time.value == pytest.approx(found.step_time_s)
    simulated = ss.simulate(model(12), CLUSTER, layout, calibration=slow)
    assert simulated.step_time_s == pytest.approx(found.step_time_s, rel=0.03)
    other = layout.replace(micro_batch=4)
    assert ss.predict(model(12), CLUSTER, other, slow).step_time_s == pytest.approx(
        ss.predict(model(12), CLUSTER, other, KNOWN).step_time_s
    )


@pytest.mark.slow
def test_calibrate_learns_shapes_from_many_rows_and_ranks_layouts_as_measured() -> None:
    rows = rows_of(calibration_for(Device.of("a100-80gb"), SOFTWARE["nemo"]), noise=0.01)
    table = [
        {
            **row.layout.model_dump(), "model": row.model, "software": "nemo",
            "step_time_s": row.seconds,
        }
        for row in rows
    ]  # fmt: skip
    mine = ss.calibrate(CLUSTER, rows=table)
    assert set(mine.shapes) == {shape_of(row.model, row.layout) for row in rows}
    assert "outlier" not in mine.note, "factors explain these rows"
    assert min(row.weight for row in mine.rows) > 0.5
    assert mine.scores["rows, cross-validated"]["mape"] < 5
    assert Calibration.from_json(mine.to_json()).shapes == mine.shapes
    assert f"Layers of {len(mine.shapes)} measured shapes take" in repr(mine)
    predicted, measured = predicted_seconds(rows, mine), np.array([row.seconds for row in rows])
    assert np.abs(predicted / measured - 1).mean() < 0.02
    for layers in (12, 16, 24):
        cell = [place for place, row in enumerate(rows) if row.model.layers == layers]
        assert measured[cell][np.argmin(predicted[cell])] <= 1.03 * measured[cell].min()
    assert [row.predicted_s for row in mine.rows] == pytest.approx(predicted.tolist(), rel=0.02)


def test_few_rows_have_no_factors() -> None:
    rows = rows_of(KNOWN)[:2]
    table = [
        {
            **row.layout.model_dump(), "model": row.model, "software": "megatron-deepspeed",
            "step_time_s": row.seconds,
        }
        for row in rows
    ]  # fmt: skip
    assert ss.calibrate(CLUSTER, rows=table).shapes == {}


def test_intervals_of_shapes_that_were_not_measured_include_what_is_not_known_of_their_factor() -> None:
    measured = Layout(data=2, tensor=4, global_batch=16, micro_batch=2, **SETTINGS)
    none = KNOWN.replace(shapes={})
    shaped = none.replace(shapes={shape_of(model(12), measured): 1.1})
    for layout, is_wider in ((measured, False), (measured.replace(micro_batch=4), True)):
        before, after = (ss.predict(model(12), CLUSTER, layout, each).uncertainty for each in (none, shaped))
        known = dict(after.shares)
        if not is_wider:
            assert "shape of layers" not in known
            assert after.between == pytest.approx(before.between, rel=0.05)
            continue
        more = np.sqrt(after.between**2 - before.between**2)
        assert 0.9 * 1.645 * SHAPE_SPREAD * 0.8 < more <= 1.01 * 1.645 * SHAPE_SPREAD
        assert known["shape of layers"] == pytest.approx((more / after.between) ** 2)
        assert "shape of layers" in after.sentence
        row = published_row("made", model(12), CLUSTER, layout, 1.0, software="megatron-deepspeed")
        row = replace(row, seconds=float(predicted_seconds([row], none)[0]))
        scores = [OneStep.of([row], each).interval_score for each in (none, shaped)]
        assert scores[1] > scores[0]


def test_deviations_that_are_independent_of_shapes_yield_no_factors() -> None:
    rows = rows_of(KNOWN)
    random, kept = np.random.default_rng(0), 0
    for _ in range(60):
        picked = [rows[place] for place in random.choice(len(rows), 12, replace=False)]
        off = random.normal(0, 0.1, len(picked))
        kept += helpful(picked, KNOWN, off, off, np.ones(len(picked))) is not None
    assert kept <= 6


def test_few_configurations_have_no_factors_however_many_rows_they_have() -> None:
    rows = [row for row in rows_of(KNOWN) if row.layout.pipeline == 1]
    rows += [replace(row, layout=row.layout.replace(global_batch=128)) for row in rows]
    off = np.log([TENSOR_FACTORS[row.layout.tensor] for row in rows])
    assert learnt(rows, KNOWN, off, off, np.ones(len(rows))).helps(off)
    assert helpful(rows, KNOWN, off, off, np.ones(len(rows))) is None


def test_terms_show_the_factor_of_the_layer_shape() -> None:
    layout = Layout(data=2, tensor=4, global_batch=16, micro_batch=2, **SETTINGS)
    slow = KNOWN.replace(shapes={shape_of(model(12), layout): 1.5})
    shown = "factor of the layer's shape"
    time = ss.predict(model(12), CLUSTER, layout, slow).time
    terms = {part.name: part for part in (*time.parts, *time.parts[0].parts)}
    for name in ("forward", "backward", "tensor parallel messages", "launches and fixed cost"):
        assert terms[name].inputs[shown] == 1.5
        assert shown in terms[name].formula
    assert shown not in terms["embedding and output"].inputs
    assert shown not in str(ss.predict(model(12), CLUSTER, layout, KNOWN.replace(shapes={})).time.to_dict())


def test_factors_hold_only_for_the_device_the_software_and_the_kind_of_layer_that_were_measured() -> None:
    layout = Layout(data=2, tensor=4, global_batch=16, micro_batch=2, **SETTINGS)
    dense = model(12)
    slow = KNOWN.replace(shapes={shape_of(dense, layout): 1.5})
    bare = KNOWN.replace(shapes={})

    def slowdown(of: Transformer, cluster: Cluster, software: str | None = None) -> float:
        found, without = (ss.predict(of, cluster, layout, each, software=software) for each in (slow, bare))
        if found.step_time_s == without.step_time_s:
            assert found.uncertainty.between > without.uncertainty.between
        return found.step_time_s / without.step_time_s

    assert slowdown(dense, CLUSTER) > 1.2
    assert slowdown(dense, Cluster.of("h100-80gb", nodes=1)) == 1.0
    assert slowdown(dense, Cluster.of("v100-32gb", nodes=1)) == 1.0
    assert slowdown(dense, CLUSTER, "nemo") == 1.0
    note = ss.predict(dense, CLUSTER, layout, slow, software="nemo").calibration.note
    assert "factors of layer shapes, measured on a100-80gb with megatron-deepspeed, are not used" in note
    experts = dense.replace(mixture=Mixture(experts=8, active=2, ffn=8192))
    for other in (experts, dense.replace(head_size=64)):
        assert slowdown(other, CLUSTER) == 1.0
    shipped = Calibration.of("a100-megatron")
    assert len(ss.predict(dense, CLUSTER, layout, shipped).calibration.shapes) == 29
    elsewhere = ss.predict(dense, Cluster.of("a100-40gb", nodes=1), layout, shipped)
    assert set(elsewhere.calibration.shapes) == {OTHERS}


EXPERTS = {"experts": 8, "active": 2, "ffn": 1024}
LATENT = {"query_rank": 256, "kv_rank": 128, "rope_size": 32, "nope_size": 64, "value_size": 64}


@pytest.mark.parametrize(
    ("fields", "layout"),
    [
        ({}, {}),
        ({"gated": True, "kv_heads": 4, "head_size": 96}, {"tensor": 2, "sequence_parallel": True}),
        ({"seq": 1_000_001}, {"context": 2, "global_batch": 2}),
        ({"latent": LATENT, "mixture": Mixture(**EXPERTS, shared_ffn=512)}, {"precision": "fp8-mixed"}),
        ({"mixture": Mixture(**EXPERTS)}, {"flash_attention": False, "precision": "fp32"}),
    ],
)  # fmt: skip
def test_names_of_shapes_are_accepted_and_no_others(
    fields: dict[str, object], layout: dict[str, object]
) -> None:
    name = shape_of(Transformer.model_validate(model(2).model_dump() | fields), Layout.model_validate(layout))
    assert KNOWN.replace(shapes={name: 1.1, OTHERS: 0.9}).shapes[name] == 1.1
    for wrong in (name.replace("heads", "head"), f"{name}, and more", name.upper()):
        with pytest.raises(SpecError, match="shapes has the name .* which is not the name of a layer shape"):
            KNOWN.replace(shapes={wrong: 1.1})
