"""Work of each rank in a step, for ranks of different speeds and a batch that may be divided unevenly."""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from shardscope.analytic.job_step import Backend, JobStep
from shardscope.analytic.terms import Term
from shardscope.machine import num_gpus
from shardscope.methods.strategies.parameter_server import ParameterServer
from shardscope.methods.strategies.parameter_server._admission import Admission
from shardscope.methods.strategies.sharded import ZeroStrategy
from shardscope.prediction.step.machine import room_on
from shardscope.spec import Job
from shardscope.spec.cluster import Cluster, EmulatedCluster
from shardscope.spec.model.step import StepTrace
from shardscope.spec.shares import MEASURED, samples_by_speed
from shardscope.spec.strategy import Work

_PASSES = ("forward", "backward")


def backend_on(cluster: Cluster | None, job: Job) -> tuple[bool, Backend]:
    """Return whether the job's ranks compute on GPUs, and their backend (on this machine, as ranks choose it)."""
    if cluster is not None:
        return True, "nccl"
    here = 0 if job.device == "cpu" else num_gpus()
    if job.device == "cuda" and not here:  # another machine's GPUs, one per rank
        return True, "nccl"
    return here > 0, "nccl" if job.world_size <= here else "gloo"


def slowness_on(emulated: EmulatedCluster | None) -> tuple[float, ...]:
    """Return the computing time of each rank relative to that on the slowest node; empty if all are alike.

    The slowdowns of single nodes are ignored without an emulated rate, because ranks then contend for the same cores.
    """
    if emulated is None or emulated.flops is None:
        return ()
    return _relative_times([node.rate for node in emulated.nodes], emulated.per_node)


def update_slowness_on(emulated: EmulatedCluster | None) -> tuple[float, ...]:
    """Return the time of each rank for an update relative to that on the slowest node; empty if all are alike."""
    if emulated is None or emulated.memory_bandwidth is None:
        return ()
    return _relative_times([node.update_rate for node in emulated.nodes], emulated.per_node)


def _relative_times(rates: Sequence[float | None], per_node: int) -> tuple[float, ...]:
    """Return the time of each rank relative to the slowest node, given the rates of the nodes."""
    known = [rate for rate in rates if rate is not None]
    factors = tuple(min(known) / rate for rate in known for _ in range(per_node))
    return () if min(factors) == 1 or len(known) < len(rates) else factors


def memory_on(
    cluster: Cluster | EmulatedCluster | None, software: str, *, job: Job, trace: StepTrace
) -> tuple[float, ...]:
    """Return the memory of each rank's device, in bytes; empty if unknown, or if the job runs on this machine.

    On GPUs, this is the memory available to tensors, by the software's memory model and the job's largest tensor.
    """
    if isinstance(cluster, EmulatedCluster):
        is_stated = all(node.memory is not None for node in cluster.nodes)
        return cluster.stated_memory() if is_stated else ()
    parts = () if cluster is None else cluster.groups or (cluster,)
    samples = job.batch.per_rank(job.num_data_ranks) // job.num_micro_batches
    largest = trace.largest_bytes * samples
    rooms = [(room_on(part, software, largest_bytes=largest), part.num_devices) for part in parts]
    return tuple(room for room, count in rooms for _ in range(count))


def rank_loads(step: JobStep) -> list[Work]:
    """Return the compute and idle time of each rank in a step, with its share of the batch.

    Both are fractions of the time that the slowest device would need to process the whole model for the samples of the
    rank with the most samples (`JobStep.samples` in each micro-batch).
    """
    work: list[Work] = list(step.job.strategy.work(step))
    readers = [rank for rank, each in enumerate(work) if each.computing > 0]
    if len(readers) == step.job.num_data_ranks:  # in a pipeline, all ranks process all samples
        for rank, count in zip(readers, rank_samples(step, readers), strict=True):
            share = count / (step.samples * step.micro_batches)
            work[rank] = Work(work[rank].computing * share, work[rank].waiting * share)
    return work


def rank_samples(step: JobStep, readers: Sequence[int]) -> tuple[int, ...]:
    """Return the samples of each rank that reads data; shares yet to be measured follow from the speeds of devices.

    Args:
        step: The step.
        readers: The ranks that read data, in order.
    """
    batch = step.job.batch
    if batch.shares != MEASURED:
        return batch.samples(len(readers))
    return samples_by_speed(
        batch.global_batch, [1 / step.slow(rank) for rank in readers], batch.micro_batch or 1
    )


def rank_updates(step: JobStep) -> list[float]:
    """Return the time of each rank's update of parameters.

    The time is relative to the time in which the slowest device updates the whole model, and 0 for ranks that
    update nothing, such as the workers of a parameter server.
    """
    strategy = step.job.strategy
    updating = strategy.updating if isinstance(strategy, ParameterServer) else range(step.world_size)
    shares = strategy.shares(step) if isinstance(strategy, ZeroStrategy) else None
    if shares is None:
        parts = [1 / (step.job.num_state_ranks if strategy.zero_stage else 1)] * step.world_size
    else:
        parts = [share / sum(shares) for share in shares]
    work = strategy.work(
        replace(step, expert_loads=())
    )  # a server that computes no passes updates whole parameters
    held = [min(1.0, each.computing / step.slow(rank)) or 1.0 for rank, each in enumerate(work)]
    return [
        part * held[rank] * step.slow_update(rank) * (rank in updating) for rank, part in enumerate(parts)
    ]


class Samples(NamedTuple):
    """Samples of one rank."""

    micro_batch: int
    """Samples in one micro-batch."""
    step: int
    """Samples in all micro-batches of a step."""


def samples_by_rank(step: JobStep) -> list[Samples]:
    """Return the samples of each rank in a step; ranks that read no data get the largest number.

    Shares yet to be measured count as equal.
    """
    found = [Samples(step.samples, step.samples * step.micro_batches)] * step.world_size
    batch, work = step.job.batch, step.job.strategy.work(step)
    readers = [rank for rank, each in enumerate(work) if each.computing > 0]
    if isinstance(batch.shares, tuple) and len(readers) == step.job.num_data_ranks:
        for rank, count in zip(readers, batch.samples(len(readers)), strict=True):
            found[rank] = Samples(batch.micro_batch or count, count)
    return found


def awaited(step: JobStep, loads: Sequence[Work]) -> Work:
    """Return the work of the rank that a step waits for: the slowest whose gradients are not dropped."""
    order = sorted(loads, key=lambda each: -each.computing)
    return order[step.job.strategy.num_dropped]


def step_seconds(step: JobStep, time: Term) -> float:
    """Return the duration of a step; for asynchronous workers, the time in which as many gradients are used as a step
    has.
    """
    if not step.job.strategy.is_asynchronous:
        return time.value
    return step.job.batch.global_batch / used_samples_per_s(step, time)


def run_seconds(step: JobStep, time: Term) -> float:
    """Return the time of all steps of a run; if workers do not share the gradients, the slowest worker's time."""
    strategy = step.job.strategy
    is_shared = isinstance(strategy, ParameterServer) and strategy.shares_gradients
    return step.job.last_step * (step_seconds(step, time) if is_shared else time.value)


def used_samples_per_s(step: JobStep, time: Term) -> float:
    """Return the samples per second, over all ranks, whose gradients are used.

    Workers of an asynchronous parameter server do not wait for each other in each step, so a slow worker slows the
    others down only as far as the staleness bound makes them wait.

    Args:
        step: The step.
        time: Time of the step, as from `job_time_term`.
    """
    job, strategy = step.job, step.job.strategy
    used = 1 - strategy.num_dropped / job.num_data_ranks
    if not isinstance(strategy, ParameterServer) or not strategy.is_asynchronous:
        return used * job.batch.global_batch / time.value
    loads = rank_loads(step)
    passes_s = sum(part.value for part in time.parts if part.name in _PASSES)
    per_load = passes_s / awaited(step, loads).computing
    cycles = [each.computing * per_load + time.value - passes_s for each in loads if each.computing > 0]
    return gradients_per_s(strategy.bound, cycles) * job.batch.global_batch / job.num_data_ranks


_ROUNDS = 60
"""Number of simulated gradients of the slowest worker; the first third is a warm-up that is not counted."""
_WARM_UP = _ROUNDS // 3


def gradients_per_s(bound: float, cycle_s: Sequence[float]) -> float:
    """Return the number of gradients of all workers that the server uses per second.

    Workers take turns as in a run: each computes, pushes its gradient, and starts again when the server has applied it.
    The server follows the same rule as in a run (Ho et al. 2013, as in `ParameterServer`).

    With a bound between 0 and infinity, a faster worker may lower the rate (in random draws, by up to a sixth), an
    anomaly known from list scheduling (Graham, Bounds on multiprocessing timing anomalies, 1969). If a gradient arrives
    before another instead of together with it, the server applies two updates instead of one, so gradients still being
    computed become staler, and later gradients wait for them longer. Without a bound, or with a bound of 0, faster
    workers never lower the rate.

    Args:
        bound: Maximum staleness of a gradient, in updates; infinite for none.
        cycle_s: Seconds of each worker from the pull of parameters until its gradient arrives at the server.

    Example:
        >>> gradients_per_s(0, [1.0, 1.0, 1.0, 2.0])
        2.0
        >>> gradients_per_s(1, [1.0, 2.0]), round(gradients_per_s(1, [1.0, 1.8]), 2)
        (1.5, 1.39)
    """
    if math.isinf(bound):
        return sum(1 / each for each in cycle_s)
    rule = Admission(bound)
    workers = range(len(cycle_s))
    rule.pull(workers)
    queue = [(cycle_s[worker], worker) for worker in workers]
    heapq.heapify(queue)
    slowest = max(workers, key=lambda worker: cycle_s[worker])
    rounds, used, began_s, now = 0, 0, 0.0, 0.0
    while rounds < _ROUNDS:
        now, worker = heapq.heappop(queue)
        rule.push(worker)
        if not rule.is_due:
            continue
        update = rule.take()
        used += len(update.workers)
        rule.pull(update.workers)
        for each in update.workers:
            heapq.heappush(queue, (now + cycle_s[each], each))
        if slowest in update.workers:
            rounds += 1
            if rounds == _WARM_UP:
                used, began_s = 0, now
    return used / (now - began_s)
