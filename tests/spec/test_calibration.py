"""Calibrations: found by name or device, carried to devices never measured, and honest about it."""

from __future__ import annotations

import pytest

from shardscope.errors import SpecError
from shardscope.spec.calibration import Calibration, catalogue
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


def test_a_device_never_measured_gets_its_neighbours_constants_and_a_wider_interval() -> None:
    device = Device.of("v100-32gb")
    carried = Calibration.of(device)
    origin = next(one for one in catalogue() if one.name in carried.note)
    assert "never measured" in carried.note
    assert carried.device == device.name
    assert not carried.fitted
    assert carried.matmul_efficiency == origin.matmul_efficiency
    for level in ("5", "95"):
        assert carried.quantiles[level] == pytest.approx(origin.quantiles[level] ** 2)
    assert carried.half_size / origin.half_size == pytest.approx((carried.ridge or 0) / (origin.ridge or 1))


def test_a_share_above_one_is_refused() -> None:
    with pytest.raises(SpecError, match="matmul_efficiency=1.2"):
        Calibration(name="too good", matmul_efficiency=1.2)


def test_a_calibration_survives_json() -> None:
    one = Calibration.of("b200-megatron")
    assert Calibration.from_json(one.to_json()) == one
