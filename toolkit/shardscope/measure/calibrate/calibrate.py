"""Measure this machine, or a cluster emulated on it, with short real runs; see `shardscope.calibrate`."""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from datetime import UTC, datetime
from pathlib import Path

import numpy as np

from shardscope.errors import DataError, SpecError, require
from shardscope.measure.calibrate.design import Design, knots_of
from shardscope.measure.calibrate.fit import Measured, fit
from shardscope.measure.calibrate.idle import idle_message_constants
from shardscope.measure.calibrate.links import pair_constants
from shardscope.measure.calibrate.observed import Observed, observed
from shardscope.measure.calibrate.prior import in_order, on_this_machine, prior_of
from shardscope.measure.calibrate.probes import cluster_probes, host_probes, run_probe
from shardscope.measure.calibrate.uncertainty import bootstrap, left_out, quantiles
from shardscope.prediction.saved_calibration import Chosen, check_can_save, chosen
from shardscope.prediction.saved_calibration import save as save_as_default
from shardscope.prediction.this_machine import core_speed
from shardscope.runtime import Run
from shardscope.spec.cluster import EmulatedCluster
from shardscope.spec.host_calibration import (
    THIS_MACHINE,
    Constant,
    HostCalibration,
    HostMachine,
)

BUDGET_S = 48.0
"""Seconds after which no further probe starts."""
_ROUNDS = 2
_BUSY = 0.5
"""Load average per core above which a calibration says that the machine was busy."""
_ENOUGH = 10
"""Number of runs below which the errors are those of the calibration that they refine."""
_ELSEWHERE = "Constants that the runs do not determine are of another machine, scaled by NumPy's speed."
Told = Callable[[int, int, str], None]


def calibrate_machine(
    cluster: EmulatedCluster | Run | None = None,
    *,
    runs: Run | Iterable[Run] | None = None,
    prior: HostCalibration | None = None,
    save: bool = True,
    progress: Told | None = None,
) -> HostCalibration:
    """Measure the constants of this machine or of an emulated cluster; see `shardscope.calibrate`."""
    if isinstance(cluster, Run):
        given, cluster = cluster, None
        runs = [given, *_listed(runs)]
    if cluster is not None:
        _check_devices(cluster)
    if save:
        check_can_save(cluster)
    started, load = time.monotonic(), os.getloadavg()[0]
    if runs is not None:
        found = _refined(_listed(runs), cluster, prior, load)
    else:
        before, is_known, _ = _known(None, prior)
        rows, jobs = _measured(cluster, progress or _silent)
        found = fitted(rows, jobs, before, cluster, is_vague=cluster is None or not is_known)
        idle, why_not = idle_message_constants()
        pairs = [] if cluster is None else pair_constants(cluster)
        kept = [row for row in found.constants if row.name != "idle_message_s"]
        found = found.replace(
            name=_name(cluster),
            note=" ".join(filter(None, [_note(load), why_not])),
            load_average=load,
            constants=in_order([*kept, *idle, *pairs]),
        )
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
    """Save the calibration; if that fails, return it with a note that says so, since measuring took a minute."""
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
    """Report nothing."""


def _name(cluster: EmulatedCluster | None) -> str:
    return THIS_MACHINE if cluster is None else cluster.name


def _note(load: float) -> str:
    if load <= _BUSY * HostMachine.here().cores:
        return ""
    return (
        f"The load average was {load:.1f} before the measurement: other programs were running. Constants may be too "
        "slow; calibrate again on a quiet machine."
    )


def _refined(
    runs: Sequence[Run], cluster: EmulatedCluster | None, prior: HostCalibration | None, load: float
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
        num_runs=before.num_runs + len(rows), note=before.note, load_average=load, name=_name(where)
    )


def _known(cluster: EmulatedCluster | None, prior: HostCalibration | None) -> Chosen:
    """Return what is known beforehand, scaled to this machine, and whether it was measured here.

    Runs that another machine's constants were fitted to do not count here, nor does their error.
    """
    found = chosen(cluster) if prior is None else Chosen(prior, is_saved=True)
    before = found.calibration
    if found.is_saved and before.machine == HostMachine.here():
        return found
    scaled = on_this_machine(before).replace(num_runs=0, error=None, note=_ELSEWHERE)
    return Chosen(scaled, is_saved=False)


def _measured(cluster: EmulatedCluster | None, progress: Told) -> tuple[list[Observed], list[int]]:
    """Run the probes in two rounds, and return what they measured and the number of the job of each.

    In the second round, a machine that was busy for a while in the first may be quiet.
    """
    probes = [*(host_probes() if cluster is None else cluster_probes(cluster))]
    started, rows, jobs = time.monotonic(), [], []
    with tempfile.TemporaryDirectory(prefix="shardscope-calibrate-") as folder:
        for turn in range(_ROUNDS * len(probes)):
            if time.monotonic() - started > BUDGET_S:
                break
            probe = probes[turn % len(probes)]
            progress(turn + 1, _ROUNDS * len(probes), f"{probe.job.label} on {probe.job.world_size}")
            rows.append(
                observed(run_probe(probe, None if probe.job.world_size == 1 else cluster, Path(folder)))
            )
            jobs.append(turn % len(probes))
    return faster(rows, jobs)


def faster(rows: Sequence[Observed], jobs: Sequence[int]) -> tuple[list[Observed], list[int]]:
    """Return the faster run of each job: other programs make a run slower, never faster."""
    best: dict[int, Observed] = {}
    for row, job in zip(rows, jobs, strict=True):
        if job not in best or row.step_s < best[job].step_s:
            best[job] = row
    return list(best.values()), list(range(len(best)))


def fitted(
    rows: Sequence[Observed],
    jobs: Sequence[int],
    before: HostCalibration,
    cluster: EmulatedCluster | None,
    *,
    is_vague: bool,
) -> HostCalibration:
    """Return a calibration fitted to these runs, with the constants of `before` that they do not depend on.

    Args:
        rows: What the runs measured.
        jobs: Number of the job of each run, from 0; runs of one job are left out together.
        before: What is known beforehand.
        cluster: The emulated cluster of the runs; None for this machine.
        is_vague: Whether `before` is of another machine; see `prior_of`.
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
    return found.replace(error=float(np.median(np.abs(1.0 / ratio - 1.0))), quantiles=quantiles(ratio))
