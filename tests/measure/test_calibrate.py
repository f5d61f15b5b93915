"""`ss.calibrate`: the fit finds the constants behind given times, and what it saves is what predictions use."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

import shardscope as ss
from shardscope import cli
from shardscope.calibration.constants import MEASURED_OF_PAIRS
from shardscope.calibration.host_calibration import (
    Constant,
    HostCalibration,
    HostMachine,
    chosen,
    path_of,
    save,
    saved,
)
from shardscope.errors import DataError, LaunchError, SpecError
from shardscope.machine import can_share_memory, usable_cores
from shardscope.measure.calibrate import calibrate as entry
from shardscope.measure.calibrate import idle, probes
from shardscope.measure.calibrate.calibrate import faster, fitted
from shardscope.measure.calibrate.design import Design, knots_of
from shardscope.measure.calibrate.entry import calibrate
from shardscope.measure.calibrate.links import _num_bytes, pair_constants
from shardscope.measure.calibrate.observed import PARTS, Observed, part_sums
from shardscope.measure.calibrate.prior import on_this_machine, prior_of
from shardscope.measure.calibrate.probes import Probe, brief_probes, host_probes, run_probe
from shardscope.prediction.job import JobPrediction
from shardscope.prediction.predict import predict
from shardscope.prediction.rates import shared_slowdown
from shardscope.runtime.emulated import why_not_emulated

HERE = HostCalibration.shipped().replace(name="this machine", machine=HostMachine.here())
JOB = ss.Job(model="mlp", data="digits", strategy="ring", world_size=2, batch=32, steps=6)


@pytest.fixture(scope="module")
def predictions() -> list[JobPrediction]:
    jobs = [probe.job.replace(steps=30) for probe in host_probes() if probe.job.model in ("mlp", "gpt-nano")]
    return [predict(job, calibration=HERE) for job in jobs]


def truth(seed: int) -> HostCalibration:
    """Constants that differ from the shipped ones by up to a factor of two."""
    draw = np.random.default_rng(seed)
    rows = []
    for row in HERE.constants:
        factor = 1.0 if (row.name, row.ranks) == ("slowdown", 1) else float(np.exp(draw.uniform(-0.7, 0.7)))
        rows.append(row.replace(value=row.value * factor, low=row.low * factor, high=row.high * factor))
    return HERE.replace(constants=tuple(rows))


def as_measured(prediction: JobPrediction, host: HostCalibration) -> Observed:
    """A run that takes exactly the time predicted with these constants."""
    found = predict(prediction.job, calibration=host)
    assert found.time is not None
    return Observed(
        prediction, found.time.value, part_sums({part.name: part.value for part in found.time.parts})
    )


def test_the_design_is_the_formulas_of_predictions(predictions: list[JobPrediction]) -> None:
    knots = knots_of(predictions)
    design = Design(predictions, knots)
    host = truth(1)
    parts, slopes = design.parts(prior_of(knots, host, is_vague=True).mean)
    for prediction, own in zip(predictions, parts, strict=True):
        expected = predict(prediction.job, calibration=host).step_time_s
        assert own.sum() == pytest.approx(expected, rel=0.02), prediction.job.label
    assert slopes.shape == (len(predictions), len(PARTS), len(knots))


def test_the_design_has_threads_slow_nodes_and_fast_links() -> None:
    slow = ss.Cluster.emulated(nodes=2, bandwidth="1 Gbit/s", slowdown={1: 16})
    fast = ss.Cluster.emulated(nodes=2, bandwidth="100 Gbit/s")
    for job, cluster in (
        (JOB.replace(strategy="single", world_size=1, threads=2), None),
        (JOB, slow),
        (JOB, fast),
    ):
        prediction = predict(job, cluster, calibration=HERE)
        knots = knots_of([prediction])
        parts, _ = Design([prediction], knots).parts(prior_of(knots, HERE, is_vague=True).mean)
        assert parts.sum() == pytest.approx(prediction.step_time_s, rel=0.02), (job.label, cluster)


def test_more_ranks_than_cores_are_slowed_down_at_least_as_many_times() -> None:
    measured = (1, 2, 4)
    flat = [Constant(name="slowdown", value=1, low=1, high=1, ranks=ranks) for ranks in measured]
    host = HERE.replace(constants=(*(row for row in HERE.constants if row.name != "slowdown"), *flat))
    active = 64 * usable_cores()
    assert shared_slowdown(host, active, usable_cores()) == 64
    assert shared_slowdown(host, 1, usable_cores()) == 1


def test_the_fit_finds_the_constants_behind_exact_times(predictions: list[JobPrediction]) -> None:
    host = truth(2)
    rows = [as_measured(prediction, host) for prediction in predictions]
    found = fitted(rows, [*range(len(rows))], HERE, None, is_vague=True)
    assert found.error < 0.03
    for name in ("flops", "operation_s", "slowdown"):
        for mine, its in zip(found.rows(name), host.rows(name), strict=True):
            assert mine.value == pytest.approx(its.value, rel=0.15), (name, mine.ranks)
    for prediction in predictions:
        expected = predict(prediction.job, calibration=host).step_time_s
        assert predict(prediction.job, calibration=found).step_time_s == pytest.approx(expected, rel=0.1)


def test_a_disturbed_run_hardly_moves_the_fit(predictions: list[JobPrediction]) -> None:
    rows = [as_measured(prediction, HERE) for prediction in predictions]
    slow = rows[0]._replace(step_s=5 * rows[0].step_s, parts={})
    found = fitted([slow, *rows[1:]], [*range(len(rows))], HERE, None, is_vague=True)
    for prediction in predictions[1:]:
        assert predict(prediction.job, calibration=found).step_time_s == pytest.approx(
            prediction.step_time_s, rel=0.1
        )


def test_of_two_runs_of_a_job_the_faster_one_counts(predictions: list[JobPrediction]) -> None:
    row = as_measured(predictions[0], HERE)
    rows, jobs, slower = faster([row, row._replace(step_s=2.0), row._replace(step_s=1.0)], [1, 0, 0])
    assert [each.step_s for each in rows] == [row.step_s, 1.0]
    assert (jobs, slower) == ([0, 1], [(1, 2.0)])


@pytest.mark.slow
def test_steps_that_took_longer_in_a_second_run_widen_the_interval_and_move_no_constant(
    predictions: list[JobPrediction],
) -> None:
    rows = [as_measured(prediction, HERE) for prediction in predictions]
    steady, unsteady = (
        fitted(rows, [*range(len(rows))], HERE, None, is_vague=True, slower=slower)
        for slower in ([], [(place, 2.0) for place in range(len(rows))])
    )
    assert unsteady.constants == steady.constants
    assert unsteady.quantiles["95"] > 1.8 > 1.2 > steady.quantiles["95"]
    assert unsteady.error == steady.error


def test_a_busy_machine_widens_the_interval_down_to_a_quiet_one() -> None:
    cores = HERE.machine.cores
    quiet, one_core_of_two, busy = (HERE.replace(load_average=load * cores) for load in (0.2, 0.5, 1.5))
    assert [each.was_busy for each in (HERE, quiet, one_core_of_two, busy)] == [False, False, True, True]
    for host, slowed in ((HERE, 1.0), (quiet, 1.2), (one_core_of_two, 1.5), (busy, 2.5)):
        assert host.interval(1.0).low == pytest.approx(HERE.quantiles["5"] / slowed)
        assert host.interval(1.0).high == HERE.quantiles["95"]


def test_a_container_has_a_share_of_the_load_and_a_system_that_counts_nobody_has_an_unknown_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    counted = ["procs_running 21"]
    monkeypatch.setattr("shardscope.machine._lines", lambda _: ["cpu 1", *counted])
    monkeypatch.setattr(entry, "usable_cores", lambda: 2.0)
    monkeypatch.setattr("os.cpu_count", lambda: 64)
    assert entry._load() == 20 * 2 / 64
    counted[0] = "procs_running 0"
    assert entry._load() is None
    assert "does not say" in entry._note(HERE.replace(load_average=None))


@pytest.mark.slow
def test_a_brief_measurement_does_not_narrow_intervals_of_what_it_did_not_measure() -> None:
    """On a machine on which what depends on the number of ranks takes twice as long as the shipped constants say."""
    host = HERE.replace(
        constants=tuple(
            row.replace(value=2 * row.value, low=2 * row.low, high=2 * row.high)
            if row.ranks not in (None, 1) and "bandwidth" not in row.name
            else row
            for row in HERE.constants
        )
    )
    before = on_this_machine(HERE)
    jobs = [probe.job.replace(steps=30) for probe in brief_probes(2)]
    rows = [as_measured(predict(job, calibration=before), host) for job in jobs]
    found = fitted(rows, [*range(len(rows))], before, None, is_vague=True)
    assert [found.has_measured(ranks) for ranks in (1, 2, 4)] == [True, True, False]
    narrow = found.quantiles["95"] / found.quantiles["5"]
    assert narrow < 1.5
    single = jobs[0]
    ring = JOB.replace(transport="shm" if can_share_memory() else "tcp")
    for job, is_known in (
        (single, True),
        (ring, True),
        (ring.replace(world_size=4), False),
        (ring.replace(compression="topk"), False),
        *([(ring.replace(transport="tcp"), False)] if can_share_memory() else []),
    ):
        low, high = predict(job, calibration=found).interval
        assert (high / low < narrow * 1.001) == is_known, job
        if job.world_size == 4:
            assert low < predict(job, calibration=host).step_time_s < high


def test_brief_probes_determine_the_constants_of_one_process_and_of_one_number_of_ranks() -> None:
    jobs = [probe.job for probe in brief_probes(3)]
    assert {job.world_size for job in jobs} == {1, 3}
    knots = knots_of([predict(job.replace(steps=30), calibration=HERE) for job in jobs])
    found = {(name, ranks) for name, ranks, _ in knots}
    assert {
        ("flops", None),
        ("bandwidth", None),
        ("operation_s", None),
        ("tensor_s", None),
        ("step_s", 1),
    } <= found
    assert {(name, 3) for name in ("slowdown", "step_s", "unit_s", "stage_s", "message_s")} <= found
    assert {probe.job.world_size for probe in brief_probes(1)} == {1}


@pytest.fixture
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder in which no calibration is saved yet."""
    monkeypatch.setenv("SHARDSCOPE_CACHE", str(tmp_path / "cache"))
    yield tmp_path / "cache"


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> ss.Run:
    return ss.launch(JOB, root=tmp_path_factory.mktemp("runs")).wait(60)


@pytest.mark.usefixtures("own_cache")
def test_what_is_measured_is_saved_and_used_by_later_predictions(monkeypatch: pytest.MonkeyPatch) -> None:
    short = [Probe(JOB), Probe(JOB.replace(strategy="single", world_size=1))]
    monkeypatch.setattr(entry, "host_probes", lambda: iter(short))
    monkeypatch.setattr(entry, "_ROUNDS", 1)
    once = idle._PROGRAM.replace("range(3)", "range(1)").replace("(2, 4, 8)", "(2,)")
    monkeypatch.setattr(idle, "_PROGRAM", once)
    monkeypatch.setattr(idle, "_PATIENCE_S", 300.0)  # other work may share the machine
    told: list[tuple[int, int, str]] = []
    found = calibrate(progress=lambda *each: told.append(each))
    assert [each[:2] for each in told] == [(1, 2), (2, 2)]
    assert saved() == found
    assert found.num_runs == 2
    if sys.platform == "linux":
        assert found.value("woken_message_s", transport="tcp") > 0
    prediction = ss.predict(JOB)
    assert prediction.host == found
    assert prediction.where == f"this machine, calibrated on {found.measured_at[:10]}"
    assert prediction.time is not None
    assert f"calibrated on {found.measured_at[:10]}" in prediction.time["matrix products"].source
    assert prediction.interval is not None
    assert prediction.interval.low < prediction.step_time_s < prediction.interval.high


def test_one_run_refines_a_calibration_towards_itself(own_cache: Path, run: ss.Run) -> None:
    measured = run.summary().step_time_s
    assert measured is not None
    added = 8 * max(measured, ss.predict(JOB, calibration=HERE).step_time_s)  # however busy the machine was
    slow = HERE.replace(
        constants=tuple(
            row.replace(value=row.value + added, low=row.low, high=2 * (row.value + added))
            if row.name == "step_s"
            else row
            for row in HERE.constants
        )
    )
    before = ss.predict(JOB, calibration=slow).step_time_s
    found = ss.calibrate(run, prior=slow, save=False)
    assert abs(np.log(ss.predict(JOB, calibration=found).step_time_s / measured)) < abs(
        np.log(before / measured)
    )
    assert not own_cache.exists() or not path_of(None).exists()
    assert found.quantiles == slow.quantiles


@pytest.mark.usefixtures("own_cache")
def test_runs_refine_what_is_known_of_another_machine_scaled_to_this_one(run: ss.Run) -> None:
    fast = 30 * HERE.numpy_flops  # its cores are about 30 times faster than those here
    other = HERE.replace(numpy_flops=fast, machine=HERE.machine.replace(cpu="another"))
    found = ss.calibrate(run, prior=other, save=False)
    assert found.machine == HostMachine.here()
    assert (found.num_runs, found.error) == (1, None)
    single = JOB.replace(model="gpt-nano", data="python-source", strategy="single", world_size=1, threads=1)
    before, after = (
        ss.predict(single, calibration=each).time["matrix products"].value for each in (other, found)
    )
    assert 1 / 5 < after / before < 5
    scaled = found.rows("codec_bandwidth")[0]
    assert scaled.high > 4 * scaled.value
    assert "are from another machine" in repr(found)


def test_a_calibration_that_cannot_be_saved_is_refused_before_and_returned_after_measuring(
    run: ss.Run, own_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own_cache.write_text("a file, not a folder")
    own_cache.chmod(0o600)
    monkeypatch.setattr(entry, "_refined", lambda *_: pytest.fail("measured"))
    with pytest.raises(DataError, match="cannot be saved"):
        ss.calibrate(run)
    monkeypatch.setattr(entry, "_refined", lambda *_: HERE)
    monkeypatch.setattr(entry, "check_can_save", lambda _: None)
    assert "It is not saved" in ss.calibrate(run).note


@pytest.mark.usefixtures("own_cache")
def test_a_brief_measurement_is_saved_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    short = [Probe(JOB), Probe(JOB.replace(strategy="single", world_size=1))]
    monkeypatch.setattr(entry, "brief_probes", lambda ranks: iter(short[: ranks - 1]))
    monkeypatch.setattr(entry, "_ROUNDS", 1)
    monkeypatch.setattr(entry, "running_processes", lambda: 7)
    monkeypatch.setattr("os.cpu_count", lambda: 1)
    found = entry.calibrate_machine(brief=2)
    assert saved() == found
    assert found.is_brief
    assert (found.num_runs, found.load_average, found.was_busy) == (1, 7.0, usable_cores() / 4 < 7)
    assert "from another machine" in found.note
    assert "on 1 and on 2 ranks" in found.note
    assert found.was_busy == ("Other programs were running" in found.note)
    assert "woken_message_s" not in {row.name for row in found.constants}, "those of another machine"


@pytest.mark.usefixtures("own_cache")
def test_a_comparison_and_a_simulation_take_a_calibration(run: ss.Run) -> None:
    twice = HERE.replace(
        constants=tuple(
            row.replace(value=row.value + 1, low=1, high=row.high + 1) if row.name == "step_s" else row
            for row in HERE.constants
        )
    )
    assert ss.compare(run, calibration=twice)["time", "step"].predicted > 1
    assert ss.simulate(JOB, calibration=twice).step_time_s > 1


@pytest.mark.usefixtures("own_cache")
def test_a_saved_calibration_of_another_machine_is_ignored_and_said_so() -> None:
    other = HERE.replace(machine=HERE.machine.replace(torch="1.0"))
    path_of(None).parent.mkdir(mode=0o700)
    other.save(path_of(None))
    calibration, is_saved, ignored = chosen()
    assert calibration == HostCalibration.shipped()
    assert not is_saved
    assert "torch was 1.0" in str(ignored)
    assert "torch was 1.0" in repr(ss.predict(JOB))
    cluster = ss.Cluster.emulated(nodes=2)
    other.replace(cluster=cluster).save(path_of(cluster))
    save(HERE)
    assert chosen(cluster).calibration == HERE
    assert "torch was 1.0" in str(chosen(cluster).ignored)
    path_of(None).write_text("{}")
    assert "cannot be read" in str(chosen().ignored)


def test_a_given_calibration_of_another_machine_is_named_and_its_note_shown() -> None:
    other = HERE.replace(
        machine=HERE.machine.replace(cpu="Z80", cores=4), note="Other programs were running."
    )
    prediction = ss.predict(JOB, calibration=other)
    label = f"Z80 with 4 cores, calibrated on {other.measured_at[:10]}"
    assert prediction.where == f"this machine, with constants of {label}"
    assert "Other programs were running." in repr(prediction)


def test_calibrations_of_gpus_and_of_ranks_are_not_mixed_up() -> None:
    with pytest.raises(SpecError, match="'h100-fsdp' is for a GPU"):
        ss.predict(JOB, calibration=ss.Calibration.of("h100-fsdp"))
    cluster = ss.Cluster.of("h100", per_node=2)
    for refused in (
        lambda: ss.predict(JOB, cluster, calibration=HERE),
        lambda: ss.plan(model="gpt3-175b", cluster=cluster, calibration=HERE),
    ):
        with pytest.raises(SpecError, match="is for CPU ranks and has no effect on h100"):
            refused()


def test_what_cannot_be_calibrated_is_refused(run: ss.Run) -> None:
    with pytest.raises(SpecError, match=r"runs=\[\] has no run"):
        ss.calibrate(runs=[])
    with pytest.raises(SpecError, match="calibrate"):
        ss.calibrate(ss.Cluster.of("h100"))
    two = ss.Cluster.emulated(nodes=2)
    with pytest.raises(SpecError, match=r"which ran on this machine and not on cluster"):
        ss.calibrate(two, runs=[run], save=False)
    with pytest.raises(SpecError, match=r"has a single device"):
        ss.calibrate(ss.Cluster.emulated(nodes=1), save=False)
    paced = ss.launch(JOB.replace(link=ss.Link.of("10GbE"), steps=2), root=run.path.parent)
    with pytest.raises(SpecError, match="paced link"):
        ss.calibrate(paced.wait(60), save=False)


def test_a_probe_that_does_not_end_is_stopped_and_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(probes, "_MOST_S", 0.0)
    with pytest.raises(LaunchError, match="world_size=1 has not finished 100000 steps"):
        run_probe(Probe(JOB.replace(strategy="single", world_size=1, steps=100_000)), None, tmp_path)
    assert not any(each.is_alive for each in ss.runs(tmp_path))


@pytest.mark.parametrize("rate", [25e3, 1e6, 1e8])
def test_a_slow_link_is_measured_in_about_a_second(rate: float) -> None:
    assert _num_bytes(rate) / rate <= 1.1


@pytest.mark.skipif(bool(why_not_emulated()), reason="clusters cannot be emulated here")
def test_a_slow_link_of_an_emulated_cluster_shows_between_its_nodes() -> None:
    cluster = ss.Cluster.emulated(nodes=2, bandwidth="400 Mbit/s", upload={1: "40 Mbit/s"})
    found = {(row.name, row.nodes): row.value for row in pair_constants(cluster)}
    assert set(found) == {(name, pair) for name in MEASURED_OF_PAIRS for pair in ((0, 1), (1, 0))}
    assert found["pair_bandwidth", (1, 0)] < 6e6 < found["pair_bandwidth", (0, 1)]
    assert not pair_constants(ss.Cluster.emulated(nodes=1))


@pytest.mark.usefixtures("own_cache")
def test_a_calibration_of_an_emulated_cluster_serves_others_and_is_preferred_for_its_own() -> None:
    cluster, other = (ss.Cluster.emulated(nodes=2, bandwidth=rate) for rate in ("100 Mbit/s", "200 Mbit/s"))
    rows = [Constant(name="message_s", value=0.5, low=0.4, high=0.6, ranks=2, transport="network")]
    found = HERE.replace(name=cluster.name, cluster=cluster, constants=(*HERE.constants, *rows))
    save(found)
    assert ss.predict(JOB, cluster).host == found
    assert ss.predict(JOB, other).host == HostCalibration.shipped()
    assert ss.predict(JOB, cluster).where == f"{cluster.name}, calibrated on {found.measured_at[:10]}"
    slow, fast = (
        ss.predict(JOB, at, calibration=found).time["ring_all_reduce"].value for at in (cluster, other)
    )
    assert slow > fast > 1.0


@pytest.mark.usefixtures("own_cache")
def test_the_command_refines_prints_json_and_writes_a_file(
    run: ss.Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    written = tmp_path / "mine.json"
    command = ["calibrate", "--runs", str(run.path), "--emulate", "none", "--json", "--no-save"]
    assert cli.main([*command, "--output", str(written)]) == 0
    assert json.loads(capsys.readouterr().out) == json.loads(written.read_text())
    assert cli.main(["compare", str(run.path), "--calibration", str(written), "--json"]) == 0
    assert "calibrated on" in json.loads(capsys.readouterr().out)["where"]
