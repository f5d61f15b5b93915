"""The entry points `shardscope.scaling`, which runs a job on several numbers of workers, and
`shardscope.extrapolate`.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Literal

from shardscope._experimental import experimental
from shardscope.analytic.stragglers import Jitter
from shardscope.calibration.calibration import Calibration, Interval
from shardscope.calibration.host_calibration import HostCalibration
from shardscope.errors import SpecError, require
from shardscope.measure.jitter import jitter as jitter_of_run
from shardscope.measure.scaling.result import LARGEST, Point, Scaling, in_order
from shardscope.measure.scaling.sizes import AnyCluster, Kind, kinds_of, numbers_of, sized_cluster, sized_job
from shardscope.prediction.job import JobPrediction, predict_job
from shardscope.runtime import Run, launch
from shardscope.simulator import simulate
from shardscope.spec import Job
from shardscope.spec.cluster import Cluster, EmulatedCluster

_PATIENCE_S = 3600.0


@experimental
def scaling(
    job: Job,
    workers: Iterable[int] = (1, 2, 4, 8),
    *,
    kind: Kind | Literal["both"] = "weak",
    cluster: EmulatedCluster | None = None,
    calibration: Calibration | HostCalibration | None = None,
    root: str | Path | None = None,
) -> Scaling:
    """Run a job on several numbers of workers, one run after another, and predict and simulate each run beforehand.

    Args:
        job: The job. Its number of workers is the number for which its batch is meant. A single worker trains
            with strategy ``single``.
        workers: Numbers of workers.
        kind: ``"weak"`` keeps the batch per worker, ``"strong"`` the global batch; ``"both"`` measures both.
        cluster: An emulated cluster, whose number of nodes follows the workers; None for this machine. Give its `flops`
            if there are more workers than cores.
        calibration: Constants for the predictions; None to use those of `ss.predict`.
        root: Folder of the runs, as for `launch`.

    Raises:
        SpecError: An argument is not valid, or the job does not suit a number of workers.
        RunFailed: A run failed.

    Example:
        >>> import shardscope as ss
        >>> job = ss.Job(model="mlp", data="digits", strategy="ring", steps=20)
        >>> cluster = ss.Cluster.emulated(bandwidth="100 Mbit/s", flops="100 MFLOP/s")
        >>> ss.scaling(job, workers=(1, 2, 4), cluster=cluster).frame()  # doctest: +SKIP
    """
    require(job, Job, by="scaling", write="ss.scaling(ss.Job(...))")
    if cluster is not None:
        require(cluster, EmulatedCluster, by="scaling", write="cluster=ss.Cluster.emulated(...)")
    sizes = [(each, number) for each in kinds_of(kind) for number in numbers_of(workers)]
    expected = [(_predicted(job, each, number, cluster, calibration), number) for each, number in sizes]
    points, notes = [], dict[str, int]()
    for (each, _), (prediction, number) in zip(sizes, expected, strict=True):
        on = sized_cluster(cluster, number)
        assert not isinstance(on, Cluster)
        run = launch(prediction.job, "this machine" if on is None else on, root=root, made_by="scaling")
        summary = run.wait(_PATIENCE_S).summary()
        points.append(_point(each, prediction)._replace(measured_s=summary.step_time_s, run=run.id))
        notes[summary.link_note or ""] = number
    told = [f"{number} workers: {note}." for note, number in notes.items() if note]
    return Scaling(job, cluster, _name(cluster), in_order(points), " ".join(told))


@experimental
def extrapolate(
    job: Job | Scaling | Run,
    cluster: Cluster | EmulatedCluster | None = None,
    *,
    workers: Iterable[int] | None = None,
    kind: Kind | Literal["both"] = "weak",
    calibration: Calibration | HostCalibration | None = None,
    jitter: Jitter | None = None,
) -> Scaling:
    """Predict the step time, the efficiency and the traffic of a job on more workers than can be run.

    Steps of up to 64 workers are simulated as well, without jitter.

    Args:
        job: A job; or the result of `scaling`, whose job, kinds and cluster are used, and whose measurements
            are kept unless another `cluster` is given. If the calibration gives no interval, the smallest and
            largest ratio of measured to predicted time give one, if there are several measurements. Or a run,
            which provides its job, its cluster, its step time, and the `jitter` of its ranks.
        cluster: The type of cluster, whose number of nodes follows the workers. None with a job to use this machine.
        workers: Numbers of workers; None for powers of two that suit the job, up to 1,024 or up to the devices that can
            be emulated.
        kind: Kind of scaling of a job, as for `scaling`.
        calibration: Constants for the predictions; None to use those of `ss.predict`.
        jitter: Variation of the ranks' computing times, as measured by `ss.jitter`. Ranks that synchronise in
            each step wait for the slowest, and wait longer the more ranks there are. None to measure the
            jitter of a given run's ranks, or to predict without jitter if no run is given.

    Raises:
        SpecError: An argument is not valid, or the job does not suit a number of workers.
        RunUnreadable: The run is too short to measure its jitter.

    Example:
        >>> import shardscope as ss
        >>> job = ss.Job(model="gpt-mini", data="python-source", strategy="ring", world_size=8)
        >>> found = ss.extrapolate(job, ss.Cluster.of("a100-80gb", nodes=1, per_node=8), workers=(8, 64, 512))
        >>> [point.workers for point in found]
        [8, 64, 512]
    """
    measured: tuple[Point, ...] = ()
    kinds, of_run = kinds_of(kind), None
    if isinstance(job, Run):
        of_run = job.id if jitter is None else None
        jitter = jitter_of_run(job) if jitter is None else jitter
        job = _of_run(job, kinds, jitter)
    if isinstance(job, Scaling):
        cluster = job.cluster if cluster is None else cluster
        measured, kinds = _measured_on(cluster, job), tuple(dict.fromkeys(point.kind for point in job.points))
        job = job.job
    require(job, Job, by="extrapolate", write="ss.extrapolate(ss.Job(...), cluster)")
    sizes = (
        {each: _suitable(job, each, cluster) for each in kinds}
        if workers is None
        else dict.fromkeys(kinds, numbers_of(workers))
    )
    ratios = [each.measured_s / each.predicted_s for each in measured if each.measured_s is not None]
    known = {(each.kind, each.workers): each for each in measured}
    points, note = list[Point](), ""
    told = (
        ()
        if of_run is None or measured
        else (f"The jitter was measured on the ranks of run {of_run}, on another cluster.",)
    )
    for each in kinds:
        for number in sorted({*sizes[each], *(number for own, number in known if own == each)}):
            point = _point(each, _predicted(job, each, number, cluster, calibration), jitter)
            if len(set(ratios)) > 1 and point.interval_s is None:
                low, high = (point.predicted_s * ratio for ratio in (min(ratios), max(ratios)))
                point = point._replace(interval_s=Interval(low, high))
                note = "The interval is the range of measured to predicted times."
            old = known.get((each, number))
            points.append(point if old is None else point._replace(measured_s=old.measured_s, run=old.run))
    return Scaling(job, cluster, _name(cluster), in_order(points), " ".join(filter(None, (*told, note))))


def _measured_on(cluster: AnyCluster, found: Scaling) -> tuple[Point, ...]:
    """Return the points of a study if it was on this type of cluster, otherwise none."""
    if cluster is None or found.cluster is None:
        return found.points if cluster is found.cluster else ()
    numbers = {point.workers for point in found.points}
    try:
        is_same = all(sized_cluster(cluster, each) == sized_cluster(found.cluster, each) for each in numbers)
    except SpecError:  # the workers do not fill nodes of the other cluster
        is_same = False
    return found.points if is_same else ()


def _suitable(job: Job, kind: Kind, cluster: AnyCluster) -> tuple[int, ...]:
    """Return the default numbers of workers that suit the job.

    Raises:
        SpecError: No default number of workers suits the job.
    """
    found, problem = [], None
    for number in _powers(cluster):
        try:
            sized_job(job, number, kind)
            found.append(number)
        except SpecError as error:
            problem = error
    if problem is not None and not found:
        raise problem
    return tuple(found)


def _predicted(
    job: Job, kind: Kind, workers: int, cluster: AnyCluster, calibration: Calibration | HostCalibration | None
) -> JobPrediction:
    return _timed(predict_job(sized_job(job, workers, kind), sized_cluster(cluster, workers), calibration))


def _timed(found: JobPrediction) -> JobPrediction:
    """Return a prediction that has a step time.

    Raises:
        SpecError: The prediction has no step time.
    """
    if found.step_time_s is None:
        raise SpecError(f"the step time cannot be predicted: {found.note}")
    return found


def _point(kind: Kind, found: JobPrediction, jitter: Jitter | None = None) -> Point:
    job = found.job
    assert found.step_time_s is not None
    can_simulate = (
        job.world_size <= LARGEST and found.traffic is not None and not job.strategy.is_asynchronous
    )
    waits_s = None if jitter is None else jitter_wait_s(found, jitter)
    later_s = waits_s or 0.0
    interval = found.interval if found.calibration is not None or found.is_calibrated else None
    return Point(
        kind, job.world_size, job.batch.global_batch, found.step_time_s + later_s,
        simulate.predicted(found).step_time_s if can_simulate else None,
        interval_s=None if interval is None else Interval(interval.low + later_s, interval.high + later_s),
        sent_bytes=None if found.sent_bytes is None else float(found.sent_bytes.max()),
        jitter_wait_s=waits_s,
    )  # fmt: skip


def _of_run(run: Run, kinds: tuple[Kind, ...], jitter: Jitter) -> Scaling:
    """Return the study whose only measurement is a run, predicted with jitter."""
    job, cluster = run.job.replace(elastic=None), run.cluster
    found = _timed(predict_job(job, cluster))
    points = [
        _point(each, found, jitter)._replace(measured_s=run.summary().step_time_s, run=run.id)
        for each in kinds
    ]
    return Scaling(job, cluster, _name(cluster), in_order(points))


def _powers(cluster: AnyCluster) -> tuple[int, ...]:
    most = 64 if isinstance(cluster, EmulatedCluster) else 1024
    least = 1 if cluster is None else cluster.per_node
    return tuple(least << k for k in range(11) if least << k <= most)


def _name(cluster: AnyCluster) -> str:
    return "this machine" if cluster is None else cluster.name


_PASSES = ("forward", "backward", "compute", "recomputation")
"""Names of the parts of a step time in which ranks compute, of jobs and of layouts."""


def jitter_wait_s(found: JobPrediction, jitter: Jitter) -> float:
    """Return the additional time of a predicted step due to jitter, in seconds.

    This is the expected computing time of the slowest rank, minus the mean. Measured jitter is relative to the
    computing time, so it also applies to other times. Ranks wait less if the gradients of the slowest ranks are dropped
    (backup workers) or if ranks synchronise every few steps (local SGD); the result is 0 if ranks never wait for each
    other.

    The stated FLOP/s of an emulated cluster do not include jitter. The constants of this machine and of GPUs
    were fitted to ranks that waited as well, so for few ranks, some jitter is counted twice.

    Args:
        found: The prediction, without jitter.
        jitter: The jitter of the ranks.
    """
    job, strategy = found.job, found.job.strategy
    if job.num_data_ranks == 1 or (strategy.unwaited_because is not None and not strategy.num_dropped):
        return 0.0
    assert found.time is not None
    passes_s = sum(part.value for part in found.time.parts if part.name in _PASSES)
    slower = jitter.slowdown(job.num_data_ranks, dropped=strategy.num_dropped, every=job.compression.period)
    return passes_s * (float(slower) - 1)
