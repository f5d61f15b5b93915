"""Expected goodput of training on a cluster whose devices fail at a given rate."""

from __future__ import annotations

from shardscope.analytic.memory.states import checkpoint_bytes
from shardscope.analytic.reliability import Reliability, expected, job_mtbf_s
from shardscope.spec.cluster import Cluster
from shardscope.spec.job import IN_LAYOUTS, Job
from shardscope.spec.layout import Layout
from shardscope.spec.layout_optimizer import AnyStates
from shardscope.spec.model import Transformer
from shardscope.spec.units import duration_text

HOUR_S = 3600.0


def expected_failures(
    cluster: Cluster,
    *,
    num_params: float,
    optimizer: AnyStates,
    precision: str,
    interval_s: float | None = None,
) -> Reliability | None:
    """Return the cost of failures and checkpoints for a training run; None if the cluster gives no failure rate.

    Training waits while each node writes its share of a checkpoint at the cluster's `storage_bandwidth`. A restart
    takes the cluster's `restart_s`, plus the time to read the checkpoint at the same bandwidth.

    Args:
        cluster: The cluster, all of whose devices are used.
        num_params: Number of parameters of the model.
        optimizer: The optimizer, or its states.
        precision: Precision of the weights and the states.
        interval_s: Training time between two checkpoints; None for the optimal interval.
    """
    if cluster.device_mtbf_hours is None:
        return None
    num_bytes = float(checkpoint_bytes(num_params, optimizer=optimizer, precision=precision))
    move_s = num_bytes / (cluster.num_nodes * cluster.storage_bandwidth)
    return expected(
        mtbf_s=job_mtbf_s(cluster.device_mtbf_hours * HOUR_S, devices=cluster.num_devices),
        save_s=move_s,
        restart_s=cluster.restart_s + move_s,
        interval_s=interval_s,
    )


def layout_failures(model: Transformer, cluster: Cluster, layout: Layout) -> Reliability | None:
    """Return the cost of failures and checkpoints for a layout at the optimal checkpoint interval; None without a
    failure rate.
    """
    return expected_failures(
        cluster, num_params=model.num_params, optimizer=layout.optimizer, precision=layout.precision
    )


def job_failures(job: Job, cluster: Cluster, num_params: int, step_s: float | None) -> Reliability | None:
    """Return the cost of failures and checkpoints for a job, at its own checkpoint interval if it has one."""
    every = job.checkpoint.every
    return expected_failures(
        cluster, num_params=num_params, optimizer=job.optimizer,
        precision=IN_LAYOUTS.get(job.precision, job.precision),
        interval_s=every * step_s if isinstance(every, int) and step_s is not None else None,
    )  # fmt: skip


def failures_text(found: Reliability | None, num_devices: int) -> str:
    """Return a sentence on the goodput; an empty string without a failure rate."""
    if found is None:
        return ""
    every, save, interval = (
        duration_text(float(each)) for each in (found.mtbf_s, found.save_s, found.interval_s)
    )
    return (
        f"One of {num_devices:,} devices fails every {every}: with a checkpoint of {save} every {interval}, goodput is "
        f"{float(found.goodput):.1%}."
    )
