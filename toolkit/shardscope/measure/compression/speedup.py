"""Whole steps with and without compression on a link: predictions of `ss.predict`, with packing times measured here.

Packing is timed on one core. Ranks that share cores are assumed to pack more slowly by the same factor as
they compute.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from math import inf

from shardscope.errors import SpecError
from shardscope.machine import usable_cores
from shardscope.measure.compression.arguments import USUAL, methods_of, refuse_unsteady
from shardscope.measure.compression.curve import MeasuredStep, PredictedStep, Worth
from shardscope.methods.strategies.bucketed import BucketedStrategy
from shardscope.prediction.job import JobPrediction, predict_job
from shardscope.prediction.rates import active_ranks, shared_slowdown
from shardscope.runtime import Run
from shardscope.runtime.record.listing import runs as list_runs
from shardscope.spec import Compression, Job, Link
from shardscope.spec.cluster import EmulatedCluster
from shardscope.spec.job_parts import label_of
from shardscope.spec.strategy import Strategy, strategies_where
from shardscope.spec.units import plural

_OPEN = frozenset({"link", "steps", "name", "lr_schedule", "record"})
"""Fields in which a run's job may differ from the job, because the compute time does not depend on them."""


def _in_a_ring(strategy: Strategy) -> bool:
    return isinstance(strategy, BucketedStrategy) and strategy.ring_directions is not None


def compression_speedup(
    job: Job,
    cluster: EmulatedCluster | None = None,
    *,
    methods: Iterable[Compression | str] | Compression | str = USUAL,
    link: Link | str | None = None,
    probe: Run | None = None,
    runs: Iterable[Run] | None = None,
) -> Worth:
    """Predict which compression methods make a job's steps faster, and on which links; notebooks show it as a
    curve.

    The step is predicted as by `ss.predict`, but with compression and decompression times measured on this
    machine, which takes a few seconds the first time. Completed runs of the job, on any link with the same
    latency, are marked on the curve.

    Args:
        job: A job with the strategy ``ring`` or ``all-reduce``.
        cluster: The emulated cluster that the job runs on, with equal links; None if it runs on this machine.
        methods: One or several methods, given by name or with their settings. The job's own method is added
            if it sends the same bytes in every step.
        link: The emulated link of each rank, or its name in the catalogue; None to use the job's link or, if it has
            none, the machine's own link.
        probe: A finished, uncompressed run of the same job on any link. The difference between its measured and
            predicted step time is then added to the compute time of all steps; None to rely on the constants of
            `ss.calibrate`.
        runs: Runs to mark if they are of this job; None for those in the folder of `ss.runs`.

    Raises:
        SpecError: The job's strategy is neither ``ring`` nor ``all-reduce``, the job has only one rank, the
            links of the cluster differ, or a method is incompatible with the job or differs between steps.
            Also raised if the probe is a run of a different job or has no finished steps, or if the ranks
            compute on GPUs, whose step time is not predicted.
    """
    if not _in_a_ring(job.strategy) or job.world_size == 1:
        rings = strategies_where(_in_a_ring)
        raise SpecError(
            f"the effect of compression cannot be predicted for strategy={job.strategy.name!r} with "
            f"world_size={job.world_size}; use strategy={' or '.join(map(repr, rings))} and world_size=2 or more"
        )
    if cluster is not None and (cluster.link is None or not cluster.has_equal_links):
        raise SpecError(
            f"the effect of compression cannot be predicted on {cluster.name}; use a cluster with one rank per node, "
            "equal links and one rack, such as ss.Cluster.emulated(nodes=2)"
        )
    compressions = [Compression("none"), *methods_of(methods)]
    for compression in compressions:
        refuse_unsteady(compression)
    own = job.compression
    if own not in compressions and own.is_fixed and own.at_step(1) == own:
        compressions.append(own)
    linked = job if link is None else job.replace(link=link)
    jobs = [linked.replace(compression=compression) for compression in compressions]
    plain = predict_job(jobs[0], cluster)
    found = [plain, *(predict_job(one, cluster, trace=lambda _: plain.found) for one in jobs[1:])]
    more_s = 0.0 if probe is None else _slower_s(jobs[0], probe, plain)
    steps = tuple(_steps(found, more_s))
    is_own = cluster is None and linked.link is None
    own_rate, efficiency = inf, 1.0
    if cluster is None:
        own_rate = predict_job(jobs[0].replace(link=None), trace=lambda _: plain.found).rates.link
    else:
        efficiency = plain.rates.link / cluster.slowest
    here = _link_of(linked, cluster) or Link(bandwidth=own_rate, latency_s=0.0)
    of = f"{label_of(job.model)}, {job.strategy.name}, {plural(job.world_size, 'rank')}"
    worth = Worth(here, steps, job.optimizer.name, own_rate, efficiency, is_own, of)
    measured = _measured(jobs[0], cluster, list_runs() if runs is None else runs, here)
    return replace(worth, measured=tuple(measured))


def _link_of(job: Job, cluster: EmulatedCluster | None) -> Link | None:
    """Return the emulated link of each rank, as the user described it; None if there is none."""
    if cluster is None:
        return job.link
    return Link(bandwidth=cluster.slowest, latency_s=cluster.latency_s)


def _measured(
    job: Job, cluster: EmulatedCluster | None, runs: Iterable[Run], here: Link
) -> Iterator[MeasuredStep]:
    """Yield the measured step of the first completed run with each method and bandwidth, on links like `here`."""
    seen = set()
    where = _without_rate(cluster)
    for run in runs:
        if not isinstance(run.job, Job) or run.state != "completed" or _without_rate(run.cluster) != where:
            continue
        link = _link_of(run.job, run.cluster) or (here if job.link is None else None)
        if (
            link is None
            or link.latency_s != here.latency_s
            or _differing(job, run.job, _OPEN | {"compression"})
        ):
            continue
        stored = run.stored_summary
        key = (run.job.compression.label, link.bandwidth)
        if stored is not None and stored.step_time_s is not None and key not in seen:
            seen.add(key)
            yield MeasuredStep(run.job.compression, link.bandwidth, stored.step_time_s, run.id)


def _without_rate(cluster: EmulatedCluster | None) -> object:
    """Return the description of a cluster without the bandwidth of its links."""
    if cluster is None:
        return None
    nodes = [node.model_dump(exclude={"upload", "download"}) for node in cluster.nodes]
    return nodes, cluster.model_dump(exclude={"nodes"})


def _differing(job: Job, other: Job, free: frozenset[str]) -> str | None:
    """Return the first field in which two jobs differ, other than `free`; None if there is none."""
    asked = job.model_dump(mode="json")
    fields = other.model_dump(mode="json").items()
    return next((field for field, value in fields if field not in free and value != asked[field]), None)


def _steps(found: Sequence[JobPrediction], more_s: float) -> Iterator[PredictedStep]:
    """Yield predicted steps, whose computation takes `more_s` longer than predicted."""
    from shardscope.measure.compression.codecs import packing_seconds  # needs torch

    plain = found[0]
    if plain.time is None or plain.host is None:
        raise SpecError(
            "the job's ranks compute on GPUs of this machine, whose step time is not predicted; describe them as a "
            "cluster, and compare ss.predict(job.replace(compression=...), ss.Cluster.of('h100', per_node="
            f"{plain.job.world_size})) with and without compression"
        )
    strategy = plain.job.strategy
    assert isinstance(strategy, BucketedStrategy)
    slow = shared_slowdown(plain.host, active_ranks(strategy.work(plain.step)), usable_cores())
    packing = packing_seconds([one.job for one in found], plain.step.buckets(strategy.bucket_mb))
    for one, codec_s in zip(found, packing, strict=True):
        assert one.time is not None
        parts = {part.name: part.value for part in one.time.parts}
        communication_s, _ = parts.pop("communication", 0.0), parts.pop("codec", 0.0)
        compute_s = max(0.0, sum(parts.values()) + more_s)
        sent_bytes = float(one.sent_bytes.max())
        yield PredictedStep(one.job.compression, sent_bytes, compute_s, slow * codec_s, communication_s)


def _slower_s(job: Job, probe: Run, plain: JobPrediction) -> float:
    """Return the measured minus the predicted step time of a probe, in seconds."""
    field = _differing(job, probe.job, _OPEN)
    if field is not None:
        raise SpecError(
            f"probe={probe.id!r} ran with {field}={getattr(probe.job, field)!r}, but the uncompressed job has "
            f"{getattr(job, field)!r}; pass an uncompressed run of the same job, or omit probe"
        )
    measured_s = probe.summary().step_time_s
    predicted_s = predict_job(probe.job, probe.cluster, trace=lambda _: plain.found).step_time_s
    if measured_s is None or predicted_s is None:
        raise SpecError(
            f"probe={probe.id!r} has no finished step; wait for it with probe.wait(), or omit probe"
        )
    return measured_s - predicted_s
