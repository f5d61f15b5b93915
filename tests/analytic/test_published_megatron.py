"""Figures of Narayanan et al. 2021 and Korthikanti et al. 2022, cell by cell, at the precision that is printed.

A figure derived from another printed figure is checked as an interval: it must reach the printed cell for some value
that rounds to the one it is derived from.
"""

from __future__ import annotations

import numpy as np
import pytest

from shardscope.analytic.compute.flops import (
    hardware_flops,
    korthikanti_hardware_flops,
    korthikanti_model_flops,
    megatron_flops,
    megatron_parameters,
    megatron_training_s,
    model_flops,
)
from shardscope.measure.scoreboard.rows import predicted_seconds
from shardscope.measure.scoreboard.tables import (
    KORTHIKANTI_5,
    MEGATRON_1,
    MEGATRON_2,
    MEGATRON_SIZES,
    SEQ,
    VOCAB,
    gpt,
    published,
)
from shardscope.spec.calibration import Calibration
from shardscope.spec.model import Transformer

PEAK = 312e12
DAY_S = 86400
TOKENS = 300e9


def covers(low: float, high: float, printed: float, unit: float) -> bool:
    """Whether something between low and high rounds to the printed figure, whose last digit counts `unit`."""
    return min(low, high) <= printed + unit / 2 and max(low, high) >= printed - unit / 2


@pytest.mark.parametrize("row", MEGATRON_1, ids=lambda row: f"{row[0]}B")
def test_table_1_parameters(row: tuple[float, ...]) -> None:
    exact = float(megatron_parameters(row[3], row[2], VOCAB, SEQ)) / 1e9
    assert round(exact, 1) == row[0]


@pytest.mark.parametrize("row", MEGATRON_1, ids=lambda row: f"{row[0]}B")
def test_table_1_per_cent_of_peak_and_total_rate(row: tuple[float, ...]) -> None:
    rate, devices = row[8], row[6]
    assert round(100 * rate * 1e12 / PEAK) == row[9]
    assert covers((rate - 0.5) * devices / 1e3, (rate + 0.5) * devices / 1e3, row[10], 0.1)


@pytest.mark.parametrize("row", MEGATRON_1, ids=lambda row: f"{row[0]}B")
def test_the_papers_flops_are_those_of_the_matrix_products(row: tuple[float, ...]) -> None:
    _, heads, hidden, layers, _, _, _, batch, *_ = row
    exact = hardware_flops(gpt(layers, hidden, heads), batch, recompute="full")
    assert float(exact) == pytest.approx(float(megatron_flops(batch, SEQ, layers, hidden, VOCAB)), rel=1e-12)


@pytest.mark.parametrize("row", MEGATRON_2, ids=lambda row: f"{row[0]}-{row[1]}B-{row[3]}")
def test_table_2_days(row: tuple[str, float, int, int, int, int, int]) -> None:
    _, billions, batch, devices, _, rate, days = row
    layers, hidden, *_ = MEGATRON_SIZES[billions]
    steps = TOKENS / (batch * SEQ)
    flops = steps * float(megatron_flops(batch, SEQ, layers, hidden, VOCAB))
    taken = [flops / (devices * (rate + off) * 1e12) / DAY_S for off in (0.5, -0.5)]
    assert covers(*taken, days, 1)


@pytest.mark.parametrize(
    ("params", "tokens", "devices", "rate", "days"),
    [(175e9, 300e9, 1024, 140e12, 34), (1008e9, 450e9, 3072, 163e12, 84)],
)
def test_days_of_training_by_equation_4(
    params: float, tokens: float, devices: int, rate: float, days: int
) -> None:
    assert round(float(megatron_training_s(tokens, params, devices, rate)) / DAY_S) == days


@pytest.mark.parametrize("row", KORTHIKANTI_5, ids=lambda row: row[0])
def test_table_5_mfu_and_hfu(row: tuple[str, *tuple[float, ...]]) -> None:
    _, layers, hidden, _, _, devices, batch, _, _, _, seconds, mfu, hfu = row
    for flops, printed in ((korthikanti_model_flops, mfu), (korthikanti_hardware_flops, hfu)):
        done = 100 * float(flops(batch, SEQ, layers, hidden, VOCAB)) / (devices * PEAK)
        assert covers(done / (seconds + 0.005), done / (seconds - 0.005), printed, 0.1)


@pytest.mark.parametrize(
    ("row", "gain"),
    list(zip(KORTHIKANTI_5, (29.0, 31.8, 29.7, 32.1), strict=True)),
    ids=lambda row: str(row)[:6],
)
def test_table_5_gain_in_throughput(row: tuple[str, *tuple[float, ...]], gain: float) -> None:
    full, selective = row[9], row[10]
    low, high = ((full + s * 0.005) / (selective - s * 0.005) for s in (-1, 1))
    assert covers(100 * (low - 1), 100 * (high - 1), gain, 0.1)


def test_the_exact_model_flops_are_korthikantis() -> None:
    model = gpt(96, 12288, 96)
    assert float(model_flops(model, 64)) == pytest.approx(
        float(korthikanti_model_flops(64, SEQ, 96, 12288, VOCAB))
    )


def test_flops_of_a_gated_grouped_query_model_are_six_a_weight_and_token() -> None:
    """An independent count: without attention's scores, 6 FLOPs for each matrix element and token."""
    model = Transformer(
        layers=3, hidden=64, heads=8, kv_heads=2, ffn=160, vocab=512, seq=32, gated=True, tied=False
    )
    matrices = 3 * (64 * (64 + 2 * 16) + 64 * 64 + 3 * 64 * 160) + 512 * 64
    scores = 3 * 2 * (2 * 32 * 32 * 64)
    assert float(model_flops(model, 5)) == 5 * (6 * 32 * matrices + 3 * scores)


@pytest.mark.parametrize(
    ("table", "most"), [("Korthikanti, table 5", 7.0), ("Megatron SC21, table 2, PTD-P", 7.0)]
)
def test_step_times_that_no_constant_was_fitted_to(table: str, most: float) -> None:
    """Constants of another A100 cluster and framework; the mean error, in per cent, stays below what is stated."""
    rows = published()[table]
    predicted = predicted_seconds(rows, Calibration.of("a100-megatron"))
    measured = np.array([row.seconds for row in rows])
    assert 100 * np.abs(predicted / measured - 1).mean() < most
