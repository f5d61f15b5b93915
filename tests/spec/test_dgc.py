"""Deep Gradient Compression as a job says it: the ratio of each step, and whose momentum it is."""

from __future__ import annotations

import pytest

import shardscope as ss


def test_the_ratio_falls_by_equal_factors_from_a_quarter() -> None:
    compression = ss.Compression("dgc", ratio=0.001, warmup_steps=4)
    ratios = [compression.at_step(step).settings["ratio"] for step in range(1, 7)]
    factor = (0.001 / 0.25) ** 0.25  # four epochs in the paper: 75 %, 93.75 %, 98.4375 %, 99.6 %, then 99.9 %
    assert ratios == pytest.approx([0.25, 0.25 * factor, 0.25 * factor**2, 0.25 * factor**3, 0.001, 0.001])
    assert [round(1 - ratio, 3) for ratio in ratios[:4]] == pytest.approx(
        [0.75, 0.9375, 0.984, 0.996], abs=2e-3
    )


@pytest.mark.parametrize(
    "compression",
    [ss.Compression("dgc"), ss.Compression("dgc", ratio=0.5, warmup_steps=9), ss.Compression("topk")],
    ids=lambda c: c.label,
)
def test_without_a_way_to_fall_the_ratio_stays(compression: ss.Compression) -> None:
    assert compression.at_step(1) == compression


def dgc_job(optimizer: ss.Optimizer, **settings: float) -> ss.Job:
    return ss.Job(
        model="mlp", data="digits", optimizer=optimizer, compression=ss.Compression("dgc", **settings)
    )  # fmt: skip


@pytest.mark.parametrize(
    "optimizer",
    [
        ss.Optimizer("nesterov"),
        ss.Optimizer("sgd", momentum=0.5),
        ss.Optimizer("lars"),
        ss.Optimizer("adamw"),
    ],
    ids=lambda o: o.name,
)
def test_a_second_momentum_is_refused(optimizer: ss.Optimizer) -> None:
    with pytest.raises(ss.SpecError, match=r"compression.momentum=0.9 would apply momentum twice"):
        dgc_job(optimizer)
    assert dgc_job(optimizer, momentum=0.0).compression.settings["momentum"] == 0.0


def test_its_own_momentum_goes_with_optimizers_without() -> None:
    for optimizer in (
        ss.Optimizer("sgd"),
        ss.Optimizer("lars", momentum=0.0),
        ss.Optimizer("adamw", betas=(0.0, 0.99)),
    ):
        assert dgc_job(optimizer).compression.settings["momentum"] == 0.9
