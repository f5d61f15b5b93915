"""The entry point `shardscope.simulate`: one step of a job or a layout, event by event."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from shardscope._experimental import experimental
from shardscope.analytic.terms import Term
from shardscope.calibration.host_calibration import AnyCalibration
from shardscope.errors import SpecError, require
from shardscope.prediction.job import JobPrediction, predict_job
from shardscope.simulator.asynchronous import AsyncSimulation, instead_of_step, simulate_asynchronous
from shardscope.simulator.breakdown import SOURCE, busy_seconds, lane_seconds, term_tree
from shardscope.simulator.collective import collective
from shardscope.simulator.of_job import JobStepGraph
from shardscope.simulator.of_layout import simulate_layout
from shardscope.simulator.replicas import Variation, replicate
from shardscope.simulator.result import Simulation
from shardscope.simulator.step import step_events
from shardscope.spec import Job
from shardscope.spec.cluster import Cluster, EmulatedCluster
from shardscope.spec.layout import Layout
from shardscope.spec.link import Link
from shardscope.spec.model import LayerTable, Model, Transformer
from shardscope.spec.units import work_text


class Failure(NamedTuple):
    """A failure during the step, after which all ranks repeat the step."""

    at_s: float
    """Seconds from the start of the step."""
    recovery_s: float = 0.0
    """Seconds until all ranks are back at the start of the step."""


class Simulator:
    """Simulates training steps event by event; `shardscope.simulate` is the one instance.

    Call the simulator to simulate a step. Its methods simulate one collective, asynchronous training or traces, and
    list the events of a predicted step.
    """

    step_events = staticmethod(step_events)
    collective = staticmethod(collective)

    def __call__(
        self,
        job: Job | Transformer | str,
        cluster: Cluster | EmulatedCluster | None = None,
        layout: Layout | None = None,
        *,
        calibration: AnyCalibration | None = None,
        software: str | None = None,
        overlap: bool = False,
        stragglers: Mapping[int, float] | None = None,
        jitter: float = 0.0,
        seed: int = 0,
        failures: Iterable[Failure | tuple[float, float]] = (),
    ) -> Simulation:
        """Simulate one training step of a job, or of a layout of a large model, event by event.

        Computations and messages take the times of `ss.predict`, but each starts when its inputs are ready: passes
        follow the schedule, ranks wait for each other, messages share links max-min fairly, and communication overlaps
        with computation. `Simulation.merged` describes which parts were merged.

        Args:
            job: A job; or a transformer or the name of one, if `layout` is given.
            cluster: The cluster; for a job, None means this machine.
            layout: The layout of the model; omit it for a job.
            calibration: The cluster's constants, as for `predict`.
            software: Name of the framework that runs the layout, as for `predict`.
            overlap: Whether the ranks of a job compute while they exchange gradients. Has no effect on layouts, whose
                overlap is in the calibration.
            stragglers: Factor of the computing time of slow ranks, by rank: ``{3: 1.5}``.
            jitter: Standard deviation of each computation's time, relative to its mean.
            seed: Seed of the jitter.
            failures: Failures of the step: times in seconds from its start, and seconds until all ranks are back at the
                start of the step.

        Example:
            >>> import shardscope as ss
            >>> job = ss.Job(model="mlp", data="digits", strategy="ring", world_size=4)
            >>> found = ss.simulate(job, stragglers={2: 2.0})
            >>> found.step_time_s > ss.simulate(job).step_time_s
            True

        Raises:
            SpecError: An argument is out of range, the job or the layout does not use exactly the cluster's devices, or
                the job has no step time.
        """
        variation = Variation(dict(stragglers or {}), jitter, seed)
        model = Model.of(job) if isinstance(job, str) and layout is not None else job
        if isinstance(model, Job):
            if layout is not None:
                raise SpecError(
                    "layout has no effect on a job, whose strategy determines job.layout(); omit it, or give a "
                    "Transformer"
                )
            found = self.predicted(
                predict_job(model, cluster, calibration, software=software), variation, overlap=overlap
            )
        else:
            if isinstance(model, LayerTable):
                model = model.as_transformer or model
            require(
                model,
                Transformer,
                by="simulate",
                write="ss.simulate(ss.Job(...)), or a Transformer and a layout",
            )
            require(cluster, Cluster, by="simulate", write="ss.Cluster.of('a100-80gb', nodes=...)")
            require(layout, Layout, by="simulate", write="ss.Layout(...)")
            assert isinstance(model, Transformer)
            assert isinstance(cluster, Cluster)
            assert layout is not None
            found = simulate_layout(model, cluster, layout, calibration, variation, software=software)
        return _with_failures(found, [Failure(*each) for each in failures])

    def predicted(
        self, prediction: JobPrediction, variation: Variation | None = None, *, overlap: bool = False
    ) -> Simulation:
        """Simulate one step of a job that has been predicted; see `__call__`."""
        variation = variation or Variation({})
        if prediction.as_layout is None or prediction.cluster is None:
            return simulate_job(prediction, variation, overlap=overlap)
        model, layout = prediction.as_layout
        found = simulate_layout(model, prediction.cluster, layout, prediction.calibration, variation)
        return replace(found, label=prediction.job.label)

    def asynchronous(
        self,
        job: Job,
        cluster: Cluster | EmulatedCluster | None = None,
        *,
        steps: int = 200,
        calibration: AnyCalibration | None = None,
        stragglers: Mapping[int, float] | None = None,
        jitter: float = 0.1,
        seed: int = 0,
    ) -> AsyncSimulation:
        """Simulate many steps of a job with an asynchronous parameter server: rate of updates, and staleness.

        Each worker computes at the speed of its own device.

        Args:
            job: A job with strategy ``parameter-server:async``.
            cluster: The cluster; None means this machine.
            steps: Number of steps of each worker, at least 10. Only updates while all workers are active
                count, after the first fifth of this time.
            calibration: The cluster's constants, as for `predict`.
            stragglers: Factor of the computing time of slow ranks, by rank.
            jitter: Standard deviation of each computation's time, relative to its mean.
            seed: Seed of the jitter.

        Example:
            >>> import shardscope as ss
            >>> job = ss.Job(model="mlp", data="digits", strategy="parameter-server:async", world_size=4)
            >>> round(ss.simulate.asynchronous(job).mean_staleness, 1)
            3.0

        Raises:
            SpecError: The strategy is not an asynchronous parameter server, or an argument is out of range.
        """
        variation = Variation(dict(stragglers or {}), jitter, seed)
        return simulate_asynchronous(predict_job(job, cluster, calibration), variation, steps=steps)

    @experimental
    def chakra(
        self,
        paths: Sequence[str | Path],
        link: Link,
        *,
        algorithms: Mapping[str, str] | None = None,
        stragglers: Mapping[int, float] | None = None,
        jitter: float = 0.0,
        seed: int = 0,
    ) -> Simulation:
        """Simulate MLCommons Chakra execution traces, such as traces from other tools or from
        `Simulation.export`.

        Computations take the durations of the trace; messages and collectives take the time that the links need. Nodes
        start in the order of their dependencies. If dependencies leave the order open, the computations of one stream
        of a rank run one at a time, in the order of their ids; different streams overlap. The stream is the attribute
        ``stream`` of a node or, if ``is_cpu_op`` is set, its thread ``tid``; 0 if it has none. Sends and receives with
        the same source, destination and tag are matched in the order of their ids. If all ranks have the same
        computations and collectives, one of them is simulated for all, unless there are stragglers or jitter.

        Args:
            paths: The trace of each rank, in the order of ranks.
            link: The link of each rank, such as ``ss.Link.of("25GbE")``.
            algorithms: Algorithms of collectives that differ from the default ones, such as ``{"all_reduce": "tree"}``;
                see `collective`. By default an ``all_to_all`` is ``pairwise``, a ``broadcast`` a ``tree`` and every
                other collective a ``ring``.
            stragglers: Factor of the computing time of slow ranks, by rank.
            jitter: Standard deviation of each computation's time, relative to its mean.
            seed: Seed of the jitter.

        Raises:
            SpecError: A file is not a Chakra trace, a trace lacks a node on which another depends, a send has
                no receive or a receive has no send, a collective has no such algorithm, the ranks of a group
                do not call the same collectives with the same bytes, or the library ``protobuf`` is not
                installed.
        """
        from shardscope.simulator.replay import CHAKRA, simulate_files

        return simulate_files(
            CHAKRA, paths, link, Variation(dict(stragglers or {}), jitter, seed), algorithms
        )

    def kineto(
        self,
        paths: Sequence[str | Path],
        link: Link,
        *,
        algorithms: Mapping[str, str] | None = None,
        stragglers: Mapping[int, float] | None = None,
        jitter: float = 0.0,
        seed: int = 0,
    ) -> Simulation:
        """Simulate a profiled step of any PyTorch job on other links, from the traces that `torch.profiler`
        exports on each rank.

        Computations, and the time that the rank's own program takes between them, have the durations of the trace.
        Collectives of Gloo or NCCL start when the rank started them, and take the time that the links need. An activity
        waits for all collectives that had ended before it started. Profile one step with ``record_shapes=True``, and
        write the trace with ``export_chrome_trace``.

        Args:
            paths: The trace of each rank, as ``.json`` or ``.json.gz``.
            link: The link of each rank, such as ``ss.Link.of("25GbE")``.
            algorithms: Algorithms of collectives that differ from the default ones, as for `chakra`.
            stragglers: Factor of the computing time of slow ranks, by rank.
            jitter: Standard deviation of each computation's time, relative to its mean.
            seed: Seed of the jitter.

        Raises:
            SpecError: A file is not a Kineto trace, a rank is missing, a size or a peer is not in the trace, or the
                ranks of a group do not call the same collectives with the same bytes.
        """
        from shardscope.simulator.replay import KINETO, simulate_files

        return simulate_files(
            KINETO, paths, link, Variation(dict(stragglers or {}), jitter, seed), algorithms
        )


simulate = Simulator()


def _with_failures(found: Simulation, failures: list[Failure]) -> Simulation:
    """Return the simulation with the time lost to failures: the lost part of each attempt, and the recovery.

    Raises:
        SpecError: A failure is not within the step, or has a negative recovery.
    """
    if not failures:
        return found
    for at_s, recovery_s in failures:
        if not 0 <= at_s <= found.step_time_s or not 0 <= recovery_s < float("inf"):
            raise SpecError(
                f"failures has ({at_s}, {recovery_s}), but the step lasts {found.step_time_s:.4g} s; give seconds "
                "within the step, and seconds of recovery"
            )
    lost = sum(at_s + recovery_s for at_s, recovery_s in failures)
    term = Term(
        "failures", lost, "s", "lost part of each attempt + recovery", {"failures": len(failures)}, SOURCE
    )
    time = Term("step", found.time.value + lost, "s", parts=(*found.time.parts, term))
    again = "After a failure, all ranks repeat the step; events and idle time are those of the last attempt."
    return replace(found, time=time, merged=(*found.merged, again), lost_s=lost)


_ORDER = ("data", "forward", "backward", "optimizer", "codec", "communication", "idle")
_IDLE = {"pipeline bubble": "idle", "fixed cost": "idle", "waiting for other ranks": "idle"}


def simulate_job(prediction: JobPrediction, variation: Variation, *, overlap: bool) -> Simulation:
    """Simulate one step of a predicted job; see `shardscope.simulate`.

    Raises:
        SpecError: The job has no step time, its strategy does not define what ranks send or does not wait for
            the slowest ranks, or the variation names ranks that do not exist.
    """
    job = prediction.job
    if job.strategy.num_dropped:
        raise SpecError(
            f"strategy={job.strategy.label!r} drops the gradients of the slowest workers, but a simulated step waits "
            "for all of them; use ss.predict, or simulate with backups=0"
        )
    if job.strategy.is_asynchronous:
        raise SpecError(
            f"strategy={job.strategy.label!r} has no step that all ranks take together; use {instead_of_step(job)}"
        )
    variation.check(job.world_size)
    step = JobStepGraph(prediction, overlap=overlap)
    graph = step.graph
    ranks = [[rank] for rank in range(job.world_size)]
    done = replicate(graph, [0], [], ranks, variation)
    lane = int(busy_seconds(done).argmax())
    is_pipeline = job.strategy.pipeline_step(prediction.step) is not None
    seconds = lane_seconds(done, lane, "pipeline bubble" if is_pipeline else "waiting for other ranks")
    parents = _IDLE | dict.fromkeys(prediction.traffic or {}, "communication")
    merged = list(step.merged)
    if not overlap:
        merged.append("No overlap of computation and communication is assumed.")
    return Simulation(
        label=job.label,
        num_devices=job.world_size,
        time=term_tree(seconds, parents, _ORDER),
        merged=tuple(merged),
        lane_ranks=tuple(map(tuple, ranks)),
        done=done,
        arrangement=job.strategy.arrangement(job.world_size),
        roles=tuple(job.strategy.role(rank, job.world_size) for rank in range(job.world_size)),
        work=work_text(job.batch.global_batch, prediction.seq),
    )
