"""Effects of software and devices: what tables have in common is found, and predicts a table that was left out."""

from __future__ import annotations

import numpy as np
import pytest

from published import more, small
from published.hierarchy import NAMES, Linear, Table, linear_fit, sd_of, table, total
from shardscope.measure.scoreboard.tables import published
from shardscope.prediction.spread import moved
from shardscope.spec.cluster import Device
from shardscope.spec.effects import composed, effects_of, fitted_effects, usual
from shardscope.spec.software import SOFTWARE

PAIRS = [(software, device) for software in SOFTWARE for device in ("a100-80gb", "h100-80gb", "b200")]


def made_table(name: str, software: str, device: str) -> Table:
    rows = published()["Llama 3, table 4"]
    return table(name, rows)._replace(effects=effects_of(SOFTWARE[software], Device.of(device)))


def test_effects_that_made_the_tables_predict_a_table_that_was_left_out() -> None:
    random = np.random.default_rng(5)
    tables = [made_table(f"{software} {device}", software, device) for software, device in PAIRS]
    truth = {e: random.normal(size=len(NAMES)) * sd_of(e) for e in {e for t in tables for e in t.effects}}
    known = {}
    for t in tables:
        slope = random.normal(size=(30, len(NAMES)))
        u = sum(factor * truth[e] for e, factor in t.effects.items())
        known[t.name] = Linear(np.zeros(len(NAMES)), slope @ u, slope)
    out, others = tables[0], tables[1:]
    start = {e: np.zeros(len(NAMES)) for t in others for e in t.all_effects}
    found = linear_fit(others, known, start)
    off = known[out.name].off
    left = known[out.name].left(found.mean(out.effects))
    assert np.std(left) < 0.5 * np.std(off)
    expected = np.sqrt(((known[out.name].slope * found.spread(out.effects)) ** 2).sum(axis=1))
    assert np.mean(np.abs(left) < 1.645 * expected) > 0.8


def test_predictions_use_the_effects_as_they_were_fitted() -> None:
    software, device = SOFTWARE["megatron-core"], Device.of("h100-80gb")
    effects = {e: np.array(list(values.values())) for e, values in fitted_effects().items()}
    expected = moved(usual(device), total(effects, effects_of(software, device)))
    found = composed(software, device)
    assert effects["all"].any()
    for name in NAMES[1:]:
        assert getattr(found, name) == pytest.approx(getattr(expected, name)), name


def test_an_unknown_pair_is_less_certain_than_a_known_one_for_every_constant() -> None:
    device = Device.of("a100-80gb")
    known, other = (
        composed(SOFTWARE["megatron-core"], device),
        composed(SOFTWARE["deepspeed"], Device.of("mi300x")),
    )
    assert (np.diag(other.covariance) >= np.diag(known.covariance)).all()


def test_rows_in_our_own_words_are_read_once() -> None:
    cells = {
        "group": "NeMo 24.12", "label": "one", "device": "h100-80gb", "nodes": 1, "per_node": 8, "seconds": 2.0,
        "model": {"name": "small", "layers": 2, "hidden": 64, "heads": 2, "vocab": 100, "seq": 32},
        "layout": {"data": 8, "global_batch": 16},
    }  # fmt: skip
    ((name, (row,)),) = more.rows([cells, cells]).items()
    assert (name, row.software, row.seconds) == ("NeMo 24.12", "megatron-core", 2.0)
    assert row.layout.data == row.cluster.num_devices == 8


def test_runs_of_mist_that_recompute_are_left_out() -> None:
    cells = {
        "case": "a", "model": "llama", "h": 64, "ffn": 128, "L": 4, "heads": 2, "flash": True, "mlp": "gated_mlp",
        "V": 100, "seq": 32, "global_batch": 8, "gpus_per_node": 4, "layers_per_stage": [2, 2],
        "ckpt_layers_per_stage": [0, 0], "stage_strategies": [[1, 2, 1, 0, 0, 1]], "measured_s": 3.0,
    }  # fmt: skip
    rows = small.mist({"rows": [cells, {**cells, "ckpt_layers_per_stage": [1, 0]}]}, "Mist, L4")
    ((layout, seconds),) = [(row.layout, row.seconds) for row in rows]
    assert (layout.data, layout.pipeline, layout.num_micro_batches, seconds) == (2, 2, 4, pytest.approx(3.0))
