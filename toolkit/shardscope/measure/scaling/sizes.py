"""The same job and the same type of cluster with another number of workers."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import cycle, islice
from typing import Any, Literal, get_args

from shardscope.errors import SpecError, unknown_name
from shardscope.spec import Batch, Job
from shardscope.spec.cluster import Cluster, EmulatedCluster

Kind = Literal["weak", "strong"]
"""Weak scaling keeps the batch per worker, strong scaling the global batch."""
AnyCluster = Cluster | EmulatedCluster | None


def kinds_of(kind: Kind | Literal["both"]) -> tuple[Kind, ...]:
    """Return the kinds of scaling that an argument selects.

    Raises:
        SpecError: The argument is not ``"weak"``, ``"strong"`` or ``"both"``.
    """
    known = get_args(Kind)
    if kind == "both":
        return known
    if kind not in known:
        raise unknown_name("kind", kind, [*known, "both"])
    return (kind,)


def numbers_of(workers: Iterable[int]) -> tuple[int, ...]:
    """Return the numbers of workers in ascending order.

    Raises:
        SpecError: The list is empty, or a value is not a whole number of at least 1.
    """
    found = tuple(workers)
    for each in found:
        if type(each) is not int or each < 1:
            raise SpecError(f"workers has {each!r}; give whole numbers of at least 1, such as (1, 2, 4, 8)")
    if not found:
        raise SpecError("workers is empty; give numbers of workers, such as (1, 2, 4, 8)")
    return tuple(sorted(set(found)))


def sized_job(job: Job, workers: int, kind: Kind) -> Job:
    """Return the job with a number of workers; a single worker trains without exchange and without compression.

    Raises:
        SpecError: The job does not suit this number of workers.
    """
    job = job.replace(elastic=None)  # its range of ranks is of no concern here
    alone: dict[str, Any] = {"strategy": "single", "compression": "none"} if workers == 1 else {}
    if workers == 1:  # there is nothing to divide
        job = job.replace(batch=job.batch.replace(shares=None, rebalance_every=None))
    if kind == "strong":
        return job.replace(world_size=workers, batch=_divided(job.batch, job, workers), **alone)
    share = job.batch.per_rank(job.num_data_ranks)
    ranks = 1 if workers == 1 else job.strategy.num_data_ranks(workers)
    return job.replace(world_size=workers, batch=job.batch.replace(global_batch=share * ranks), **alone)


def _divided(batch: Batch, job: Job, workers: int) -> Batch:
    """Return the batch with micro-batches that are no larger than a worker's share."""
    ranks = 1 if workers == 1 else job.strategy.num_data_ranks(workers)
    share = batch.per_rank(ranks, among=f"{ranks} workers")
    if batch.micro_batch is None:
        return batch
    return batch.replace(micro_batch=min(batch.micro_batch, share))


def sized_cluster(cluster: AnyCluster, workers: int) -> AnyCluster:
    """Return the cluster with one device per worker; on a single node if they fit on one.

    Nodes of an emulated cluster that differ are repeated in their order; its racks become one.

    Raises:
        SpecError: The workers do not fill whole nodes.
    """
    if cluster is None:
        return None
    per_node = min(cluster.per_node, workers)
    nodes, rest = divmod(workers, per_node)
    if rest:
        raise SpecError(
            f"workers={workers} do not fill nodes of {cluster.per_node} devices; use multiples of {cluster.per_node}"
        )
    if isinstance(cluster, EmulatedCluster):
        each = tuple(islice(cycle(cluster.nodes), nodes))
        return cluster.replace(nodes=each, per_node=per_node, racks=1, rack_bandwidth=None)
    return cluster.replace(nodes=nodes, per_node=per_node)
