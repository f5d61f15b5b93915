"""Calibrations: found by name or device, carried to devices never measured, and honest about it."""

from __future__ import annotations

import numpy as np
import pytest

from shardscope.calibration.calibration import FACTORS, Calibration, catalogue
from shardscope.calibration.effects import table_scores
from shardscope.errors import SpecError
from shardscope.spec.cluster import Device


def test_every_calibration_says_where_it_comes_from_and_which_rows_it_saw() -> None:
    for one in catalogue():
        assert one.source, one.name
        assert one.measured_on, one.name
        assert one.note, one.name
        assert len(one.fitted) == len(set(one.fitted)) > 5, one.name
        assert Device.of(one.device).name == one.device


def test_a_calibration_is_found_by_its_name_and_by_its_device() -> None:
    assert Calibration.of("h100-fsdp").device == "h100-80gb"
    assert Calibration.of("h100-80gb").name == "h100-fsdp"
    assert Calibration.of(Device.of("a100-80gb")).name == "a100-megatron"


def test_an_unknown_name_is_refused_with_those_there_are() -> None:
    with pytest.raises(SpecError, match="calibration='abacus' is not known.*b200-megatron"):
        Calibration.of("abacus")


def test_a_pair_never_measured_gets_what_similar_ones_have_in_common_and_a_wider_interval() -> None:
    other, a100 = Device.of("mi250x"), Device.of("a100-80gb")
    carried, known = Calibration.of(other, "megatron-core"), Calibration.of(a100, "megatron-core")
    assert "never measured on mi250x" in carried.note
    assert "on other clusters of a100-80gb, or of devices with the same chip (a100-40gb)" in known.note
    assert (carried.device, carried.software) == ("mi250x", "megatron-core")
    slower = Calibration.of(Device.of("t4"), "megatron-core")  # MI250X and others lie between measured peaks
    assert (np.diag(slower.covariance) > np.diag(known.covariance)).all()
    assert carried.half_size < known.half_size, "an MI250X has fewer FLOP per byte"


def test_a_pair_that_one_cluster_measured_gets_its_calibration() -> None:
    assert Calibration.of("a100-80gb", "llm-foundry").name == "a100-fsdp"
    assert Calibration.of("h100-80gb", "llm-foundry").name == "h100-fsdp"
    assert Calibration.of("a100-80gb", "megatron-deepspeed").name == "megatron-deepspeed on a100-80gb"


def test_constants_of_another_device_with_the_same_chip_say_so() -> None:
    assert (
        "measured on h100-80gb, which has the same chip as h200" in Calibration.of("h200", "llm-foundry").note
    )
    assert "same chip" not in Calibration.of("h100-80gb", "llm-foundry").note
    assert "on other clusters of l4" in Calibration.of("l4", "megatron-core").note


def test_every_table_that_effects_were_fitted_to_was_scored_without_it() -> None:
    scores = table_scores().values()
    assert len(scores) > 10
    assert np.median([each["left_out"] for each in scores]) < min(
        np.median([each["plain"] for each in scores]), np.median([each["constant_mfu"] for each in scores])
    )
    assert np.median([each["after"] for each in scores]) < np.median([each["left_out"] for each in scores])


def test_a_share_above_one_is_refused() -> None:
    with pytest.raises(SpecError, match="matmul_efficiency=1.2"):
        Calibration(name="too good", matmul_efficiency=1.2)


def test_a_covariance_of_another_size_is_refused() -> None:
    fields = Calibration.of("b200-megatron").replace(covariance=np.eye(len(FACTORS)).tolist()).model_dump()
    fields["covariance"] = [row[1:] for row in fields["covariance"][1:]]
    with pytest.raises(SpecError, match=r"^covariance has 22 rows; give 23 rows"):
        Calibration.from_fields(fields)


def test_a_calibration_survives_json() -> None:
    one = Calibration.of("b200-megatron")
    assert Calibration.from_json(one.to_json()) == one
