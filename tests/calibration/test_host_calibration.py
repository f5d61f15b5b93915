"""Calibrations of CPU ranks: rows with intervals that interpolate, survive files and know their machine."""

from __future__ import annotations

from pathlib import Path

import pytest

import shardscope as ss
from shardscope.calibration.constants import CONSTANTS, MEASURED_OF_PAIRS
from shardscope.calibration.host_calibration import Constant, HostCalibration, HostMachine
from shardscope.errors import SpecError

SHIPPED = HostCalibration.shipped()


def test_what_ships_has_every_constant_that_predictions_use_and_says_how_far_it_may_be_off() -> None:
    names = {row.name for row in SHIPPED.constants}
    assert names == CONSTANTS.keys() - {*MEASURED_OF_PAIRS}
    assert all(row.low < row.high for row in SHIPPED.constants if row.name != "slowdown")
    assert SHIPPED.quantiles["5"] < 1 < SHIPPED.quantiles["95"]


def test_it_survives_json_and_files(tmp_path: Path) -> None:
    assert HostCalibration.from_json(SHIPPED.to_json()) == SHIPPED
    assert ss.HostCalibration.load(SHIPPED.save(tmp_path / "mine.json")) == SHIPPED


def test_a_file_that_is_missing_or_no_calibration_is_named(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match=r"none.json' cannot be read"):
        HostCalibration.load(tmp_path / "none.json")
    (tmp_path / "other.json").write_text("{}")
    with pytest.raises(SpecError, match="requires name"):
        HostCalibration.load(tmp_path / "other.json")


def test_values_between_measured_numbers_of_ranks_are_interpolated_on_logarithmic_scales() -> None:
    rows = [
        Constant(name="message_s", value=v, low=v, high=v, ranks=n, transport="tcp")
        for n, v in ((2, 1.0), (8, 4.0))
    ]
    found = SHIPPED.replace(constants=tuple(rows))
    at = [found.value("message_s", ranks=ranks, transport="tcp") for ranks in (1, 2, 4, 8, 16)]
    assert at == pytest.approx([1.0, 1.0, 2.0, 4.0, 8.0])


def test_a_constant_that_was_not_measured_is_refused_by_name() -> None:
    with pytest.raises(SpecError, match="has no message_s over network"):
        SHIPPED.value("message_s", transport="network")


def test_a_value_outside_its_interval_and_a_constant_given_twice_are_refused() -> None:
    with pytest.raises(SpecError, match="flops=1 is outside its interval 2 to 3"):
        Constant(name="flops", value=1.0, low=2.0, high=3.0)
    with pytest.raises(SpecError, match="constants has 'flops' twice"):
        SHIPPED.replace(constants=(SHIPPED.rows("flops")[0],) * 2)
    with pytest.raises(SpecError, match="name='speed' is not a constant"):
        Constant(name="speed", value=1.0, low=1.0, high=1.0)


def test_it_knows_when_it_is_of_another_machine() -> None:
    here = HostMachine.here()
    assert SHIPPED.replace(machine=here).why_not_here() is None
    other = SHIPPED.replace(machine=here.replace(cores=here.cores + 1))
    assert "cores was" in str(other.why_not_here())
    assert "torch was 1.0 and is" in str(SHIPPED.replace(machine=here.replace(torch="1.0")).why_not_here())
    older = [row for row in SHIPPED.constants if row.name != "stage_s"]
    assert "it has no stage_s" in str(SHIPPED.replace(machine=here, constants=tuple(older)).why_not_here())


def test_times_of_messages_that_an_earlier_version_measured_differently_are_not_used() -> None:
    here = SHIPPED.replace(machine=HostMachine.here())
    older = HostCalibration.from_json(here.to_json().replace("woken_message_s", "idle_message_s"))
    assert {row.name for row in {*SHIPPED.constants} - {*older.constants}} == {"woken_message_s"}
    job = ss.Job(model="mlp", data="digits", strategy="ring", world_size=2)
    emulated = ss.Cluster.emulated(nodes=2, flops="1 GFLOP/s")
    found, expected = (ss.predict(job, emulated, calibration=each) for each in (older, here))
    assert "It has no woken_message_s" in str(found.note)
    assert found.step_time_s == expected.step_time_s


def test_quantiles_need_the_ends_of_the_interval() -> None:
    with pytest.raises(SpecError, match="has no '95'; give the levels"):
        SHIPPED.replace(quantiles={"5": 0.5})


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"p99": 1.5}, "quantiles has the level 'p99'; give levels in per cent below 100"),
        ({"100": 1.5}, "quantiles has the level '100'; give levels in per cent below 100"),
        ({"97.5": 1.1}, "do not increase with their level; give increasing ones"),
    ],
)
def test_quantiles_have_increasing_values_at_levels_in_per_cent(more: dict[str, float], message: str) -> None:
    usual = {"5": 0.8, "95": 1.2}
    assert SHIPPED.replace(quantiles=usual | {"97.5": 1.3}).quantiles["97.5"] == 1.3
    with pytest.raises(SpecError, match=message):
        SHIPPED.replace(quantiles=usual | more)


def test_text_and_html_show_every_constant_with_its_interval() -> None:
    row = SHIPPED.rows("message_s", "shm")[-1]
    for shown in (repr(SHIPPED), SHIPPED._repr_html_()):
        assert f"shm, {row.ranks} ranks" in shown
        assert all(constant.name in shown for constant in SHIPPED.constants)
    told = f"{SHIPPED.num_runs} runs; on runs left out of the fit, the median error is {SHIPPED.error:.1%}, and 90% of"
    assert told in repr(SHIPPED)
    assert len(SHIPPED.frame()) == len(SHIPPED.constants)
