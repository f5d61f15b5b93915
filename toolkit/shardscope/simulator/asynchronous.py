"""Asynchronous training with parameter servers, over many steps: the rate of updates, and the staleness of
gradients.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from shardscope.errors import SpecError
from shardscope.methods.strategies.parameter_server import ParameterServer
from shardscope.prediction.job import JobPrediction
from shardscope.simulator.graph import Floats, Graph, Ints
from shardscope.simulator.of_job import JobStepGraph
from shardscope.simulator.parts import StepTimes
from shardscope.simulator.replicas import Variation, replicate
from shardscope.spec.job import Job

_WARM_UP = 0.2
"""Fraction of the time that is not counted, because workers start together."""


@dataclass(frozen=True)
class AsyncSimulation:
    """Result of a simulation of many steps of asynchronous workers.

    Attributes:
        updates_per_s: Number of gradients that the servers apply per second, from all workers.
        staleness: Fraction of the gradients with each staleness, 0, 1, ...: the number of updates that the servers
            apply between reading the parameters for a gradient and applying it.
        predicted_staleness: Mean staleness by the closed form: W - 1 for W workers, regardless of their speeds
            (Zhang et al. 2016, arXiv 1511.05950, section 3, measure the same).
        worker_updates: Number of counted gradients of each worker.
        num_events: Number of events that the simulation processed.
    """

    updates_per_s: float
    staleness: Floats
    predicted_staleness: float
    worker_updates: tuple[int, ...]
    num_events: int

    @property
    def mean_staleness(self) -> float:
        """Mean staleness of a gradient, in updates."""
        return float(np.arange(len(self.staleness)) @ self.staleness)

    def to_dict(self) -> dict[str, Any]:
        """Return all values in a JSON-compatible form."""
        return {
            "updates_per_s": self.updates_per_s, "mean_staleness": self.mean_staleness,
            "predicted_staleness": self.predicted_staleness, "staleness": self.staleness.tolist(),
            "worker_updates": list(self.worker_updates), "num_events": self.num_events,
        }  # fmt: skip


@dataclass(frozen=True)
class _Built:
    """The operations that apply gradients in all steps, in order, each with its worker and server."""

    graph: Graph
    applied: Ints
    """Operations; shape (workers, steps, servers)."""


def simulate_asynchronous(prediction: JobPrediction, variation: Variation, *, steps: int) -> AsyncSimulation:
    """Simulate asynchronous workers; see `shardscope.simulate.asynchronous`.

    Raises:
        SpecError: The strategy is not an asynchronous parameter server, or `steps` is too small.
    """
    job, strategy = prediction.job, prediction.job.strategy
    if not isinstance(strategy, ParameterServer) or np.isfinite(strategy.bound):
        raise SpecError(
            f"strategy={strategy.label!r} is not asynchronous; use strategy='parameter-server:async', or "
            f"{instead_of_step(job) if strategy.is_asynchronous else 'ss.simulate'}"
        )
    if steps < 10:
        raise SpecError(f"steps={steps} is too few for a distribution; give at least 10")
    variation.check(job.world_size)
    workers = list(strategy.workers(job.world_size))
    built = _build(prediction, workers, strategy.servers, steps)
    ranks = [[rank] for rank in range(job.world_size)]
    done = replicate(built.graph, [0], [], ranks, variation)
    return _measured(built, done.times.end, done.times.num_events)


def instead_of_step(job: Job) -> str:
    """Return the call that predicts the speed of an asynchronous job's workers, for error messages."""
    if isinstance(job.strategy, ParameterServer) and np.isinf(job.strategy.bound):
        return "ss.simulate.asynchronous"
    return "ss.predict(job).samples_per_s, which takes the staleness bound into account"


def _build(prediction: JobPrediction, workers: list[int], servers: int, steps: int) -> _Built:
    """Build the steps of all workers (compute, push, apply, pull), each at the speed of its own device.

    A server is a link of capacity 1, which gradients that are being applied at the same time share.
    """
    step = JobStepGraph(prediction)
    wires, job = step.wire, prediction.job
    plan = job.strategy.plan(prediction.step)
    sizes = {each.collective: {} for each in plan.exchanges}  # type: dict[str, dict[tuple[int, int], int]]
    for each in plan.exchanges:
        for move in (move for rounds in each.rounds for move in rounds.moves):
            sizes[each.collective][move.source, move.target] = move.num_bytes
    assert prediction.time is not None
    times = StepTimes.of(prediction.time)
    passes, own = times.forward + times.backward, times.data + times.codec + times.rest
    graph = step.emptied()
    serving = [graph.link(f"server {server}", 1.0) for server in range(servers)]
    applied = np.zeros((len(workers), steps, servers), np.int64)

    def message(source: int, target: int, kind: str, after: int) -> int:
        if source == target:
            return after
        wire, size = wires(kind, source, target), float(sizes[kind][source, target])
        return graph.add(
            source, kind, wire.latency + wire.message_s, size=size, links=wire.links, after=[after], peer=target,
            serial=False,
        )  # fmt: skip

    last = [graph.add(worker) for worker in workers]
    for number in range(steps):
        for place, worker in enumerate(workers):
            ready = graph.add(worker, "gradient", step.work[worker] * passes + own, after=[last[place]])
            pulled = []
            for server in range(servers):
                pushed = message(worker, server, "server_push", ready)
                seconds = step.updates[server] / servers
                end = graph.add(server, "optimizer", size=seconds, links=[serving[server]], after=[pushed])
                applied[place, number, server] = end
                pulled.append(message(server, worker, "server_pull", end))
            last[place] = graph.add(worker, after=pulled)
    return _Built(graph, applied)


def _measured(built: _Built, ends: Floats, num_events: int) -> AsyncSimulation:
    """Count the updates between reading the parameters and applying the gradient, while all workers are active."""
    at = ends[built.applied]
    workers, steps, servers = at.shape
    last = float(at[:, -1].max(axis=-1).min())
    first = max(_WARM_UP * last, float(at[:, 0].max()))
    counts = np.zeros(workers * steps, np.int64)
    own = np.zeros(workers, np.int64)
    for server in range(servers):
        applied = at[:, :, server]
        place = np.empty(workers * steps, np.int64)
        place[np.argsort(applied.ravel(), kind="stable")] = np.arange(workers * steps)
        between = np.diff(place.reshape(workers, steps), axis=1) - 1
        counted = (applied[:, 1:] > first) & (applied[:, 1:] <= last)
        counts += np.bincount(between[counted], minlength=len(counts))
        own += counted.sum(axis=1)
    if not counts.any():
        raise SpecError(f"steps={steps} is too few: at no time are all workers active; give more")
    counts = counts[: int(counts.nonzero()[0].max()) + 1]
    return AsyncSimulation(
        updates_per_s=float(own.sum()) / servers / (last - first),
        staleness=np.asarray(counts / counts.sum()),
        predicted_staleness=float(workers - 1),
        worker_updates=tuple(int(each) // servers for each in own),
        num_events=num_events,
    )
