"""Published figures, cell by cell, at the precision at which they are printed.

Memory: ZeRO, Korthikanti et al. 2022, DeepSpeed's estimators. Parameters, FLOPs, times: Narayanan et al. 2021 and
Korthikanti et al. A figure derived from another printed one is checked as an interval: it must reach the printed cell
for some value that rounds to the one it is derived from.
"""

from __future__ import annotations

from decimal import ROUND_DOWN, ROUND_HALF_UP, Decimal

import numpy as np
import pytest

from analytic.deepspeed import zero_2_estimate, zero_3_estimate
from analytic.published_tables import (
    DEEPSPEED_EXAMPLE,
    KORTHIKANTI_FIGURE_1,
    KORTHIKANTI_FIGURE_7,
    KORTHIKANTI_GLOBAL_BATCH,
    KORTHIKANTI_TABLE_3,
    ZERO_FIGURE_1,
    ZERO_TABLE_1,
    ZERO_TABLE_2,
)
from published.formulas import megatron_flops
from published.tables import published
from published.tables.papers import (
    KORTHIKANTI_5,
    MEGATRON_1,
    MEGATRON_2,
    MEGATRON_SIZES,
    SEQ,
    VOCAB,
    gpt,
    llama,
)
from shardscope.analytic.compute.flops import (
    hardware_flops,
    model_flops,
)
from shardscope.analytic.memory import (
    FRAMEWORKS,
    RECIPES,
    activation_bytes_per_layer,
    memory_term,
    model_state_bytes,
    stage_memory,
)
from shardscope.calibration.calibration import Calibration
from shardscope.measure.calibrate.rows import predicted_seconds
from shardscope.spec.layout import Layout
from shardscope.spec.model import Transformer

RECIPE, MEGATRON = RECIPES["fp16-mixed"], FRAMEWORKS["megatron-2022"]
TOKENS, WORDS = 2048, 51200
PEAK = 312e12
DAY_S = 86400
TRAINING_TOKENS = 300e9


def is_printed(exact: float, printed: str) -> bool:
    """Whether a figure, rounded or cut to the digits that are printed, is what is printed; the ZeRO paper does both."""
    digits = Decimal(1).scaleb(Decimal(printed).as_tuple().exponent)
    value = Decimal(repr(float(exact)))
    return Decimal(printed) in {value.quantize(digits, way) for way in (ROUND_HALF_UP, ROUND_DOWN)}


@pytest.mark.parametrize(("params", "ranks"), ZERO_TABLE_1)
def test_table_1_of_the_zero_paper(params: str, ranks: int) -> None:
    held = model_state_bytes(float(params), zero_stage=[1, 2, 3], data_parallel=ranks, precision="fp16-mixed")
    for size, printed in zip(held / 1e9, ZERO_TABLE_1[params, ranks], strict=True):
        assert is_printed(size, printed), (size, printed)


def test_figure_1_of_the_zero_paper() -> None:
    held = model_state_bytes(7.5e9, zero_stage=[0, 1, 2, 3], data_parallel=64, precision="fp16-mixed")
    assert all(is_printed(size, printed) for size, printed in zip(held / 1e9, ZERO_FIGURE_1, strict=True))


def test_the_first_row_of_table_2_of_the_zero_paper() -> None:
    """Parameters that 32 GB hold; 8 billion bytes more or less would show in the last digit."""
    per_param = model_state_bytes(1, zero_stage=[0, 1, 2, 3], data_parallel=64, precision="fp16-mixed")
    for fits, printed in zip(32e9 / per_param, ZERO_TABLE_2[1], strict=True):
        assert is_printed(fits / 1e9, str(Decimal(printed) / 10**9)), (fits, printed)


@pytest.mark.parametrize("degree", [2, 4, 8, 16])
def test_the_other_rows_of_table_2_of_the_zero_paper(degree: int) -> None:
    """The paper multiplies its rounded first row by the model-parallel degree."""
    for first, printed in zip(ZERO_TABLE_2[1], ZERO_TABLE_2[degree], strict=True):
        unit = 10**12 if Decimal(printed) in {Decimal("0.5e12"), Decimal("1e12"), Decimal("2e12")} else 10**9
        shown = str((Decimal(printed) / unit).normalize() + 0)
        assert is_printed(float(degree * Decimal(first) / unit), shown), (first, printed)


def test_the_examples_in_the_text_of_the_zero_paper() -> None:
    """GPT-2 of 1.5 billion parameters needs 24 GB (section 3.1); K is 12 with Adam, 8 with momentum, 4 without."""
    assert model_state_bytes(1.5e9, precision="fp16-mixed") == 24e9
    optimizers = {"adamw": 12, "nesterov": 8, "sgd": 4}
    for optimizer, k in optimizers.items():
        assert model_state_bytes(1, optimizer=optimizer, precision="fp16-mixed") == 4 + k


def korthikanti(name: str) -> tuple[Transformer, dict[str, int]]:
    row = KORTHIKANTI_TABLE_3[name]
    sizes = {key: row[key] for key in ("heads", "hidden", "layers")}
    return Transformer(vocab=WORDS, seq=TOKENS, **sizes), row


@pytest.mark.parametrize("name", KORTHIKANTI_TABLE_3)
def test_activation_formulas_of_korthikanti(name: str) -> None:
    """Table 2 of arXiv 2205.05198: bytes of a layer under each technique."""
    model, row = korthikanti(name)
    s, b, h, a, t = TOKENS, row["micro_batch"], row["hidden"], row["heads"], row["tensor"]
    expected = {
        (1, False, "none"): s * b * h * (34 + 5 * a * s / h),
        (t, False, "none"): s * b * h * (10 + 24 / t + 5 * a * s / (h * t)),
        (t, True, "none"): s * b * h / t * (34 + 5 * a * s / h),
        (t, False, "selective"): s * b * h * (10 + 24 / t),
        (t, True, "selective"): 34 * s * b * h / t,
        (1, False, "full"): 2 * s * b * h,
    }
    for (tensor, split, recompute), size in expected.items():
        held = activation_bytes_per_layer(
            model, micro_batch=b, tensor=tensor, sequence_parallel=split, recompute=recompute,
            recipe=RECIPE, framework=MEGATRON,
        )  # fmt: skip
        assert float(held) == pytest.approx(size, rel=1e-14)


def first_stage(name: str, **changes: object) -> float:
    """Bytes of activations on the first stage."""
    model, row = korthikanti(name)
    layout = Layout(
        tensor=row["tensor"], pipeline=row["pipeline"], micro_batch=row["micro_batch"], flash_attention=False,
        global_batch=KORTHIKANTI_GLOBAL_BATCH[name], virtual_stages=row["chunks"],
        schedule="interleaved" if row["chunks"] > 1 else "1f1b", precision="fp16-mixed",
    )  # fmt: skip
    held = stage_memory(model, layout.replace(**changes), framework="megatron-2022")
    return float(held.activations[0])


@pytest.mark.parametrize("name", KORTHIKANTI_TABLE_3)
def test_the_first_stages_activations_of_korthikanti(name: str) -> None:
    """Equation 5, the interleaved schedule's factor 1 + (p-1)/(pm) and the embedding's mask, sections 4.2.3 and 4.3."""
    model, row = korthikanti(name)
    t, p, chunks = row["tensor"], row["pipeline"], row["chunks"]
    sbh = TOKENS * row["micro_batch"] * row["hidden"]
    factor = 1 + (p - 1) / (p * chunks) if chunks > 1 else 1
    layers = sbh * model.layers / t * (34 + 5 * row["heads"] * TOKENS / row["hidden"]) * factor
    in_flight = p * factor
    assert first_stage(name, sequence_parallel=True) == pytest.approx(layers + sbh * in_flight / t, rel=1e-12)


@pytest.mark.parametrize("name", KORTHIKANTI_FIGURE_1)
def test_figure_1_of_korthikanti(name: str) -> None:
    """Within 2.5 %, which is what one can read off; 18 bytes a parameter: fp32 gradients beside the short weights."""
    model, row = korthikanti(name)
    states, none, both = KORTHIKANTI_FIGURE_1[name]
    assert 18 * model.num_params / (row["tensor"] * row["pipeline"]) / 2**30 == pytest.approx(
        states, rel=0.025
    )
    assert first_stage(name) / 2**30 == pytest.approx(none, rel=0.025)
    saved = first_stage(name, sequence_parallel=True, recompute="selective")
    assert saved / 2**30 == pytest.approx(both, rel=0.025)


@pytest.mark.parametrize("name", KORTHIKANTI_FIGURE_7)
def test_figure_7_of_korthikanti(name: str) -> None:
    """Within a fifth of a percentage point, which is what one can read off."""
    model, row = korthikanti(name)

    def layer(**way: object) -> float:
        return float(
            activation_bytes_per_layer(
                model,
                micro_batch=row["micro_batch"],
                tensor=row["tensor"],
                recipe=RECIPE,
                framework=MEGATRON,
                **way,
            )
        )

    ways = [
        {"sequence_parallel": True},
        {"recompute": "selective"},
        {"sequence_parallel": True, "recompute": "selective"},
        {"recompute": "full"},
    ]
    percents = [100 * layer(**way) / layer() for way in ways]
    assert percents == pytest.approx(KORTHIKANTI_FIGURE_7[name], abs=0.2)


def test_the_savings_in_the_text_of_korthikanti() -> None:
    """Section 5: selective recomputation saves 70 % of GPT-3's activations and 65 % of MT-NLG's."""
    for name, percent in {"175B": 70, "530B": 65}.items():
        model, _ = korthikanti(name)
        kept = activation_bytes_per_layer(model, recompute="selective", recipe=RECIPE, framework=MEGATRON)
        whole = activation_bytes_per_layer(model, recipe=RECIPE, framework=MEGATRON)
        assert round(100 * (1 - float(kept / whole))) == percent


def test_deepspeeds_documented_example_follows_its_old_rule() -> None:
    """The documentation gives whole millions of parameters, so each printed figure lies between two."""
    millions = DEEPSPEED_EXAMPLE["millions of parameters"]
    params = np.array([millions, millions + 1]) * 1e6

    def lies_between(low_and_high: np.ndarray, printed: str) -> bool:
        low, high = low_and_high / 2**30
        return low - 0.005 <= float(printed) <= high + 0.005

    plain = zero_2_estimate(params, devices=8, per_node=8, rule="before")
    offload = zero_2_estimate(params, devices=8, per_node=8, offload=True)
    assert lies_between(plain.device, DEEPSPEED_EXAMPLE["device"])
    assert lies_between(offload.device, DEEPSPEED_EXAMPLE["device, offload"])
    assert lies_between(offload.host, DEEPSPEED_EXAMPLE["host, offload"])


def test_deepspeeds_rules_of_today() -> None:
    assert zero_2_estimate(8e9, devices=8, per_node=8).device == 2 * 8e9 + 18e9
    assert zero_3_estimate(8e9, largest_layer=1e8, devices=8) == 4e8 + 18e9


# Parameters, FLOPs and times.


def covers(low: float, high: float, printed: float, unit: float) -> bool:
    """Whether something between low and high rounds to the printed figure, whose last digit counts `unit`."""
    return min(low, high) <= printed + unit / 2 and max(low, high) >= printed - unit / 2


@pytest.mark.parametrize("row", MEGATRON_1, ids=lambda row: f"{row[0]}B")
def test_table_1_parameters(row: tuple[float, ...]) -> None:
    assert round(gpt(layers=row[3], hidden=row[2], heads=row[1]).num_params / 1e9, 1) == row[0]


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
    steps = TRAINING_TOKENS / (batch * SEQ)
    flops = steps * float(megatron_flops(batch, SEQ, layers, hidden, VOCAB))
    taken = [flops / (devices * (rate + off) * 1e12) / DAY_S for off in (0.5, -0.5)]
    assert covers(*taken, days, 1)


@pytest.mark.parametrize("row", KORTHIKANTI_5, ids=lambda row: row[0])
def test_table_5_mfu(row: tuple[str, *tuple[float, ...]]) -> None:
    _, layers, hidden, heads, _, devices, batch, _, _, _, seconds, mfu, _ = row
    done = 100 * float(model_flops(gpt(layers, hidden, heads), batch)) / (devices * PEAK)
    assert covers(done / (seconds + 0.005), done / (seconds - 0.005), mfu, 0.1)


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
    """Korthikanti et al. 2022 (arXiv 2205.05198), equation 7: 72 B L s h² (1 + s/(6h) + V/(12 h L))."""
    layers, h = 96, 12288
    printed = 72 * 64 * layers * SEQ * h**2 * (1 + SEQ / (6 * h) + VOCAB / (12 * h * layers))
    assert float(model_flops(gpt(layers, h, 96), 64)) == pytest.approx(printed)


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


TITAN_PEAKS = ((8, 2, "selective", 8192, "bf16-mixed", 77.0), (128, 2, "selective", 8192, "bf16-mixed", 62.0),
               (8, 1, "full", 32768, "fp8-mixed", 83.9))  # fmt: skip
"""Llama 3.1 8B with FSDP2 (pytorch/torchtitan, benchmarks/llama3_h100_202412_torchtitan.md): devices, sequences of a
device, recomputation, tokens of a sequence, precision, GiB that the allocator reserved at the peak."""


@pytest.mark.parametrize("row", TITAN_PEAKS, ids=str)
def test_fsdp2_needs_the_memory_that_torchtitan_measured(row):
    devices, each, recompute, seq, precision, peak = row
    layout = Layout(
        data=devices,
        zero=3,
        global_batch=each * devices,
        micro_batch=each,
        recompute=recompute,
        precision=precision,
    )
    term = memory_term(llama("llama3.1-8B", seq), layout, framework="fsdp2")
    assert FRAMEWORKS["fsdp2"].reserved * term.value / 2**30 == pytest.approx(peak, rel=0.05)
