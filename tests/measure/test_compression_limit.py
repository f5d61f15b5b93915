"""Below which bandwidth to compress: from predicted steps, and a range if runs contradict them."""

from __future__ import annotations

import pytest

import shardscope as ss
from shardscope.measure.compression_limit import compression_limit
from shardscope.measure.compression_speedup import MARGIN, PredictedStep, Worth


def step(method: str, sent: float, rest_s: float, *, rate: float = 1e6) -> PredictedStep:
    return PredictedStep(ss.Compression(method), sent, rest_s, 0.0, sent / rate, 0.0)


@pytest.fixture
def whole() -> Worth:
    """On 8 Mbit/s, 1 MB takes 1 s: 1.1 s uncompressed, 0.25 s with int4, and less with topk, whose loss suffers."""
    steps = (step("none", 1e6, 0.1), step("int4", 1e5, 0.15), step("topk", 1e4, 0.1))
    link = ss.Link(bandwidth="8 Mbit/s", latency="1 ms")
    return Worth(f"a link of {link.label}", steps, link, "adamw")


def test_at_the_bandwidth_found_the_step_is_faster_by_the_margin(whole: Worth) -> None:
    plain, int4, _ = whole.at(whole.pays_below(whole.steps[1])).steps
    assert plain.step_s / int4.step_s == pytest.approx(MARGIN)


def test_another_bandwidth_changes_only_the_time_of_the_bytes(whole: Worth) -> None:
    faster = whole.at("80 Mbit/s")
    assert faster.link == "a link of 80 Mbit/s, 1 ms"
    assert [one.step_s for one in faster.steps] == pytest.approx([0.2, 0.16, 0.101])


def test_the_machines_own_link_has_no_bandwidth_to_change(whole: Worth) -> None:
    own = Worth("the machine's own link", whole.steps)
    for ask in (lambda: own.at("1 Gbit/s"), lambda: own.pays_below(own.steps[1])):
        with pytest.raises(ss.SpecError, match="own link does not depend on a bandwidth; pass link="):
            ask()


def test_only_a_method_whose_loss_is_within_its_tolerance_is_recommended(whole: Worth) -> None:
    assert whole.best.compression.name == "topk"
    assert whole.recommended.compression.name == "int4"
    assert "compression pays off: with int4 a step takes 250 ms instead of 1.1 s" in whole.verdict
    assert "topk would be faster" in whole.verdict
    assert "loss 19% higher with AdamW, tolerance 3%" in whole.verdict


def test_accurate_predictions_give_one_limit(whole: Worth) -> None:
    found = compression_limit(whole, {"none": 1.1, "int4": 0.26, "topk": 0.11})
    assert not found.is_range
    assert found.low == found.bandwidth == found.high == pytest.approx(whole.pays_below(whole.steps[1]))
    assert found.sentence == (
        "**Below 97.7 Mbit/s use int4** (4.23 times faster at 8 Mbit/s, 4.40 predicted; predicted speed-ups were off "
        "by 0% to 4%); above it no compressor whose loss stays within its tolerance gains 15%."
    )


def test_predictions_that_are_off_by_more_than_the_margin_give_a_range(whole: Worth) -> None:
    found = compression_limit(whole, {"none": 1.1, "int4": 0.3125})  # a fifth less than predicted
    assert found.errors == pytest.approx((0.2, 0.2))
    assert found.low == pytest.approx(whole.pays_below(whole.steps[1], margin=MARGIN * 1.2))
    assert found.high == pytest.approx(whole.pays_below(whole.steps[1], margin=MARGIN / 1.2))
    assert found.low < found.bandwidth < found.high
    assert " to " in found.sentence.split(" use int4")[0]
    assert "more than 15%, so a range replaces the predicted 97.7 Mbit/s" in found.sentence


def test_errors_that_allow_any_link_are_admitted(whole: Worth) -> None:
    found = compression_limit(whole, {"none": 1.1, "int4": 0.125})  # twice the predicted speed-up
    assert found.high == float("inf")
    assert found.sentence.endswith("above it predictions cannot tell whether int4 gains 15%.")


def test_a_missing_run_and_methods_without_a_measured_loss_are_refused(whole: Worth) -> None:
    with pytest.raises(ss.SpecError, match="measured lacks 'int4', which the limit depends on"):
        compression_limit(whole, {"none": 1.1, "topk": 0.11})
    lossy = Worth(whole.link, (whole.steps[0], whole.steps[2]), whole.emulated)
    with pytest.raises(
        ss.SpecError, match="methods contains no method whose loss stays within its tolerance"
    ):
        compression_limit(lossy, {"none": 1.1, "topk": 0.11})
