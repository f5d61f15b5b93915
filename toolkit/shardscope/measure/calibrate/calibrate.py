"""Measure this machine, or a cluster emulated on it, with short real runs; see `shardscope.calibrate`."""

from __future__ import annotations

import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from statistics import mean
from typing import NamedTuple

import numpy as np

from shardscope.calibration.host_calibration import (
    THIS_MACHINE,
    Chosen,
    Constant,
    HostCalibration,
    HostMachine,
    check_can_save,
    chosen,
)
from shardscope.calibration.host_calibration import save as save_as_default
from shardscope.calibration.this_machine import core_speed
from shardscope.errors import DataError, SpecError, require
from shardscope.machine import running_processes, usable_cores
from shardscope.measure.calibrate.design import Design, knots_of
from shardscope.measure.calibrate.fit import Measured, fit
from shardscope.measure.calibrate.idle import woken_message_constants
from shardscope.measure.calibrate.links import pair_constants
from shardscope.measure.calibrate.observed import Observed, observed
from shardscope.measure.calibrate.prior import in_order, on_this_machine, prior_of
from shardscope.measure.calibrate.probes import Probe, brief_probes, cluster_probes, host_probes, run_probe
from shardscope.measure.calibrate.uncertainty import bootstrap, left_out, quantiles
from shardscope.runtime import Run
from shardscope.spec.cluster import EmulatedCluster

BUDGET_S, BRIEF_S = 48.0, 20.0
"""Seconds after which no further probe starts, in a full and in a brief calibration."""
_ROUNDS = 2
_LOOKS, _LOOK_S = 3, 0.02
"""Number of samples of the load by other programs before a probe, and pause between samples, in seconds: ranks of the
previous probe may still be ending."""
_ENOUGH = 10
"""Minimum number of runs for new error estimates; with fewer, a refined calibration keeps those of the one it
refines."""
_BRIEF = "Measured briefly, on 1 and on {brief} ranks; ss.calibrate() takes a minute and measures more."
_ELSEWHERE = "Constants that these runs do not determine are from another machine, scaled by NumPy's speed on this one."
_LOAD_UNKNOWN = "This system does not say whether other programs were running during the measurement."
Told = Callable[[int, int, str], None]


def calibrate_machine(
    cluster: EmulatedCluster | Run | None = None,
    *,
    runs: Run | Iterable[Run] | None = None,
    prior: HostCalibration | None = None,
    save: bool = True,
    progress: Told | None = None,
    brief: int | None = None,
) -> HostCalibration:
    """Measure the constants of this machine or of an emulated cluster; see `shardscope.calibrate`.

    Args:
        cluster: See `shardscope.calibrate`, also for the next four arguments.
        runs: Runs instead of a measurement.
        prior: Calibration to refine.
        save: Whether to save the result.
        progress: Function that is called before each probe.
        brief: Number of ranks of a brief calibration of this machine, which takes 20 seconds instead of a minute: it
            measures only one process and this number of ranks. None for a full calibration.
    """
    if isinstance(cluster, Run):
        given, cluster = cluster, None
        runs = [given, *_listed(runs)]
    if cluster is not None:
        _check_devices(cluster)
    if save:
        check_can_save(cluster)
    started = time.monotonic()
    if runs is not None:
        found = _refined(_listed(runs), cluster, prior)
    else:
        is_brief = brief is not None
        # what an earlier brief measurement found may have been disturbed
        before, is_known, _ = _known(None, HostCalibration.shipped() if is_brief and prior is None else prior)
        probes = [*_probes(cluster, brief)]
        rows, jobs, slower, load = _measured(
            probes, cluster, progress or _silent, budget_s=BRIEF_S if is_brief else BUDGET_S
        )
        found = fitted(rows, jobs, before, cluster, is_vague=cluster is None or not is_known, slower=slower)
        idle, why_not = ([], _BRIEF.format(brief=brief)) if is_brief else woken_message_constants()
        pairs = [] if cluster is None else pair_constants(cluster)
        kept = [row for row in found.constants if row.name != "woken_message_s"]
        found = found.replace(
            name=_name(cluster),
            load_average=load,
            is_brief=is_brief,
            constants=in_order([*kept, *idle, *pairs]),
        )
        elsewhere = "" if all(row.is_measured for row in found.constants) else _ELSEWHERE
        found = found.replace(note=" ".join(filter(None, [_note(found), why_not, elsewhere])))
    found = found.replace(
        took_s=time.monotonic() - started, measured_at=f"{datetime.now(UTC):%Y-%m-%d %H:%M}"
    )
    return _saved(found) if save else found


def _check_devices(cluster: EmulatedCluster) -> None:
    if cluster.num_devices == 1:
        raise SpecError(
            f"cluster {cluster.name!r} has a single device, which sends no messages; calibrate this machine with "
            "ss.calibrate(), or give a cluster with nodes=2 or more"
        )


def _saved(found: HostCalibration) -> HostCalibration:
    """Save the calibration; if that fails, return it with a note, because measuring took a minute."""
    try:
        save_as_default(found)
    except (OSError, DataError) as error:
        note = f"It is not saved: {error}. Keep it with calibration.save('mine.json')."
        return found.replace(note=f"{found.note} {note}".strip())
    return found


def _listed(runs: Run | Iterable[Run] | None) -> list[Run]:
    listed = [runs] if isinstance(runs, Run) else list(runs or [])
    for run in listed:
        require(run, Run, by="calibrate", write="runs=[run, ...] with runs of ss.launch")
    return listed


def _silent(number: int, count: int, name: str) -> None:
    """No-op, used if no progress function is given."""


def _name(cluster: EmulatedCluster | None) -> str:
    return THIS_MACHINE if cluster is None else cluster.name


def _note(found: HostCalibration) -> str:
    if found.load_average is None:
        return _LOAD_UNKNOWN
    if not found.was_busy:
        return ""
    return (
        f"Other programs were running during calibration (load {found.load_average:.1f}), so predicted steps "
        "may be too slow; prediction intervals are widened to include the faster steps of an idle machine. "
        "Calibrate again when the machine is idle."
    )


def _refined(
    runs: Sequence[Run], cluster: EmulatedCluster | None, prior: HostCalibration | None
) -> HostCalibration:
    if not runs:
        raise SpecError("runs=[] has no run; give at least one finished run, or omit runs to measure")
    other = next((run for run in runs if cluster is not None and run.cluster != cluster), None)
    if cluster is not None and other is not None:
        at = "this machine" if other.cluster is None else f"cluster {other.cluster.name!r}"
        raise SpecError(
            f"runs contains {other.id!r}, which ran on {at} and not on cluster {cluster.name!r}; leave it out, or "
            "omit the cluster"
        )
    wheres = {run.cluster for run in runs}
    if len(wheres) > 1:
        raise SpecError("runs contains runs on different clusters; calibrate each cluster with its own runs")
    where = wheres.pop()
    before, is_known, _ = _known(where, prior)
    rows = [observed(run) for run in runs]
    names = [run.job.replace(seed=0, name=None).to_json() for run in runs]
    found = fitted(rows, [names.index(name) for name in names], before, where, is_vague=not is_known)
    return found.replace(
        num_runs=before.num_runs + len(rows),
        note=before.note,
        load_average=before.load_average,
        name=_name(where),
    )


def _known(cluster: EmulatedCluster | None, prior: HostCalibration | None) -> Chosen:
    """Return the prior calibration, scaled to this machine, and whether it was measured here.

    Runs and errors of another machine's calibration are dropped.
    """
    found = chosen(cluster) if prior is None else Chosen(prior, is_saved=True)
    before = found.calibration
    if found.is_saved and before.machine == HostMachine.here():
        return found
    scaled = on_this_machine(before).replace(num_runs=0, error=None, note=_ELSEWHERE)
    return Chosen(scaled, is_saved=False)


def _probes(cluster: EmulatedCluster | None, brief: int | None) -> Iterable[Probe]:
    if cluster is not None:
        return cluster_probes(cluster)
    return host_probes() if brief is None else brief_probes(brief)


class _Measured(NamedTuple):
    """Measurements of the probes.

    Attributes:
        rows: The faster run of each job, because other programs can only slow a run down.
        jobs: Job number of each row.
        slower: Numbers of the jobs that ran again, and how many times longer their slower runs took.
        load: Load by other programs, or None; see `HostCalibration.load_average`.
    """

    rows: list[Observed]
    jobs: list[int]
    slower: list[tuple[int, float]]
    load: float | None


def _measured(
    probes: Sequence[Probe], cluster: EmulatedCluster | None, progress: Told, *, budget_s: float
) -> _Measured:
    """Run the probes in two rounds, and return what they measured.

    A machine that was busy for a while in the first round may be quiet in the second.
    """
    started, rows, jobs, loads = time.monotonic(), [], [], []
    before = None if sys.platform == "linux" else os.getloadavg()[0]
    with tempfile.TemporaryDirectory(prefix="shardscope-calibrate-") as folder:
        for turn in range(_ROUNDS * len(probes)):
            if time.monotonic() - started > budget_s:
                break
            loads.append(_load())
            probe = probes[turn % len(probes)]
            progress(turn + 1, _ROUNDS * len(probes), f"{probe.job.label} on {probe.job.world_size}")
            rows.append(
                observed(run_probe(probe, None if probe.job.world_size == 1 else cluster, Path(folder)))
            )
            jobs.append(turn % len(probes))
    known = [load for load in loads if load is not None]
    return _Measured(*faster(rows, jobs), load=float(mean(known)) if known else before)


def _load() -> float | None:
    """Return how many other processes are now running on, or waiting for, a core of this process; None if unknown.

    This is the minimum of several samples, so it is an underestimate. A container is assumed to have the same share of
    the host's processes as of the host's cores.
    """
    seen = []
    for _ in range(_LOOKS):
        seen.append(running_processes())
        time.sleep(_LOOK_S)
    share = min(1.0, usable_cores() / (os.cpu_count() or 1))
    return min((share * each for each in seen if each is not None), default=None)


def faster(
    rows: Sequence[Observed], jobs: Sequence[int]
) -> tuple[list[Observed], list[int], list[tuple[int, float]]]:
    """Return the faster run of each job, the jobs' numbers, and by job how many times longer its slower runs took."""
    best: dict[int, Observed] = {}
    for row, job in zip(rows, jobs, strict=True):
        if job not in best or row.step_s < best[job].step_s:
            best[job] = row
    order = list(best)
    ratios = [(order.index(job), row.step_s / best[job].step_s) for row, job in zip(rows, jobs, strict=True)]
    slower = [each for each in ratios if each[1] > 1]
    return list(best.values()), list(range(len(best))), slower


def fitted(
    rows: Sequence[Observed],
    jobs: Sequence[int],
    before: HostCalibration,
    cluster: EmulatedCluster | None,
    *,
    is_vague: bool,
    slower: Sequence[tuple[int, float]] = (),
) -> HostCalibration:
    """Return a calibration fitted to these runs; constants on which the runs do not depend are taken from `before`.

    Args:
        rows: Measurements of the runs.
        jobs: Number of the job of each run, from 0; runs of one job are left out together.
        before: The prior calibration.
        cluster: The emulated cluster of the runs; None for this machine.
        is_vague: Whether `before` was measured on another machine; see `prior_of`.
        slower: Indices into `rows` of jobs with a slower run that is not used in the fit, and how many times longer
            that run took. These ratios widen the interval, because steps of one job differ between runs.
    """
    predictions = [row.prediction for row in rows]
    knots = knots_of(predictions)
    design, measured, prior = (
        Design(predictions, knots),
        Measured.of(rows),
        prior_of(knots, before, is_vague=is_vague),
    )
    x = fit(design, measured, prior)
    interval = bootstrap(design, measured, prior, x, jobs)
    constants = {row.key: row for row in before.constants if row.nodes is None}
    for (name, ranks, transport), ends in zip(knots, np.exp([interval.low, x, interval.high]).T, strict=True):
        low, value, high = map(float, ends)
        row = Constant(name=name, value=value, low=low, high=high, ranks=ranks, transport=transport)
        constants[row.key] = row
    speed = core_speed()
    found = HostCalibration(
        name=_name(cluster), machine=HostMachine.here(), cluster=cluster, constants=in_order(constants.values()),
        numpy_flops=speed.flops, numpy_bandwidth=speed.bandwidth, measured_at=before.measured_at,
        num_runs=len(rows), error=before.error, quantiles=before.quantiles,
    )  # fmt: skip
    if len(rows) < _ENOUGH:
        return found
    ratio = left_out(design, measured, prior, x, jobs)
    every = np.array([*ratio, *(ratio[place] * longer for place, longer in slower)])
    return found.replace(error=float(np.median(np.abs(1.0 / ratio - 1.0))), quantiles=quantiles(every))
