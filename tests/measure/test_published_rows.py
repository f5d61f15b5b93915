"""Rows of published tables: their times give the FLOP/s that the sources print, and no run beats its device."""

from __future__ import annotations

import pytest

from published.formulas import megatron_flops
from published.tables import published
from published.tables.mlperf import LABELS, MLPERF
from published.tables.volta import MEGATRON_2019, MEGATRON_2021
from shardscope.analytic.compute.flops import hardware_flops, model_flops
from shardscope.measure.calibrate.rows import Row

NVIDIA_TFLOPS = {
    "NeMo 25.02, B200": (1722, 1506, 1474, 1658, 1387, 1268),
    "NeMo 25.04, GB200": (1942, 1917, 1943, 1763, 1674, 1551),
}
"""Model TFLOP/s per GPU, the last column of NVIDIA's tables."""

BIGSCIENCE_TFLOPS = {
    "DeepSpeed 0.3, V100": (
        41.9, 40.3, 40.8, 37.0, 43.0, 44.5, 44.7, 42.9, 43.1, 43.6, 37.0, 45.5, 38.9, 38.9, 36.0, 38.7,
    ),
    "Megatron-DeepSpeed, V100": (49.7, 50.1, 48.8, 48.3, 48.3, 45.4, 45.4, 48.0, 49.1, 49.1, 48.7),
}  # fmt: skip
"""TFLOP/s that BigScience prints: 8 FLOPs for each of 52 or 39 billion parameters and each token. The first pipeline's
(46.7) are those of another run, and stand here as its formula gives them."""


def tflops(row: Row, flops: float) -> float:
    return flops / row.seconds / row.layout.num_devices / 1e12


@pytest.mark.parametrize("name", NVIDIA_TFLOPS)
def test_nvidias_tokens_per_second_are_its_tflops(name: str) -> None:
    rows = published()[name]
    made = [tflops(row, float(model_flops(row.model, row.layout.global_batch))) for row in rows]
    assert made == pytest.approx(NVIDIA_TFLOPS[name], rel=0.012)


def test_megatrons_milliseconds_on_v100_are_its_tflops() -> None:
    for row, given in zip(published()["Megatron-LM 2021, V100"], MEGATRON_2021, strict=True):
        model = row.model
        work = float(
            megatron_flops(row.layout.global_batch, model.seq, model.layers, model.hidden, model.vocab)
        )
        assert tflops(row, work) == pytest.approx(given[-1], rel=0.004), given


def test_megatrons_largest_run_of_2019_does_15_petaflops() -> None:
    """Its text: up to 15.1 PFLOP/s on 512 devices, 39 TFLOP/s on one."""
    row = published()["Megatron-LM 2019, V100"][-1]
    assert row.layout.num_devices == 512
    first, last = (39 * per_cent / 100 for *_, per_cent in (MEGATRON_2019[0], MEGATRON_2019[-1]))
    assert last * 512 / 1e3 == pytest.approx(15.1, rel=0.03)
    executed = tflops(row, float(hardware_flops(row.model, row.layout.global_batch, recompute="full")))
    assert executed == pytest.approx(last, rel=0.1)
    assert first == 39


def test_lightnings_milliseconds_are_its_tflops() -> None:
    """Of all four devices, with recomputation: 142.28 TFLOP/s with 64 sequences a device."""
    row = next(row for row in published()["FSDP of Lightning, V100"] if row.layout.micro_batch == 64)
    executed = 4 * tflops(row, float(hardware_flops(row.model, row.layout.global_batch, recompute="full")))
    assert executed == pytest.approx(142.28, rel=0.02)


@pytest.mark.parametrize("name", BIGSCIENCE_TFLOPS)
def test_bigsciences_seconds_are_its_tflops(name: str) -> None:
    for row, given in zip(published()[name], BIGSCIENCE_TFLOPS[name], strict=True):
        parameters = {64: 52e9, 48: 39e9}[row.model.layers]
        work = 8 * parameters * row.layout.global_batch * row.model.seq
        assert tflops(row, work) == pytest.approx(given, rel=0.02), row.inputs
        done = float(hardware_flops(row.model, row.layout.global_batch, recompute="full"))
        assert done == pytest.approx(work, rel=0.06)


def test_gpt_2_is_tuned_to_the_batches_that_deepspeed_chose() -> None:
    """Larger micro-batches give more sequences per second, for each model."""
    rows = published()["DeepSpeed 0.5, V100"]
    rates = {}
    for row in rows:
        rates.setdefault(row.model.name, []).append(row.layout.global_batch / row.seconds)
    assert {row.layout.num_devices for row in rows} == {16}
    assert all(rate == sorted(rate) for rate in rates.values())


def test_the_steps_of_mlperf_are_its_throughput_less_validation() -> None:
    """Rounds 3 and 4 count the time of validation, every 24,576 sequences; round 5 the training alone."""
    made = [row for label in LABELS.values() for row in published()[label]]
    for row, given in zip(made, MLPERF, strict=True):
        assert row.layout.num_devices == given[4]
        if given[-1] is not None:
            ratio = given[-1] * row.seconds / (row.layout.global_batch * row.model.seq)
            assert (0.95 if given[0] == "5.0" else 0.83) < ratio < 1.0, given


def test_every_run_is_possible() -> None:
    for name, rows in published().items():
        for row in rows:
            row.layout.check(row.model, row.cluster)
            peaks = row.cluster.device.peak_flops
            peak = max(
                rate for dtype, rate in peaks.items() if dtype != "fp8" or row.layout.precision == "fp8-mixed"
            )
            work = float(model_flops(row.model, row.layout.global_batch))
            assert 0 < tflops(row, work) < 0.9 * peak / 1e12, (name, row.layout)
