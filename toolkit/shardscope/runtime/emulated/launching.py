"""Requirements that a job must meet to be launched on an emulated cluster."""

from __future__ import annotations

from shardscope.errors import LaunchError, SpecError
from shardscope.runtime.emulated.support import why_not_emulated
from shardscope.spec import Job
from shardscope.spec.cluster import EmulatedCluster
from shardscope.spec.units import plural


def on_cluster(job: Job, cluster: EmulatedCluster) -> Job:
    """Return the job as it runs on an emulated cluster: on CPU cores.

    Raises:
        LaunchError: The cluster is not emulated, or clusters cannot be emulated here.
        SpecError: The job's number of ranks differs from the cluster's number of devices, or the job specifies its own
            link, needs a GPU, or needs shared memory.
    """
    if not isinstance(cluster, EmulatedCluster):
        raise LaunchError(
            f"launch trains on this machine, or on a cluster emulated on it, not on cluster {cluster!r:.40}; give "
            "ss.Cluster.emulated(...), or start the job on your machines with torchrun"
        )
    check_suits(job, cluster)
    why = why_not_emulated()
    if why:
        raise LaunchError(why)
    return as_launched(job)


def as_launched(job: Job) -> Job:
    """Return a job as it runs on an emulated cluster, whose devices are CPU cores."""
    return job.replace(device="cpu")


def check_suits(job: Job, cluster: EmulatedCluster) -> None:
    """Reject a job that cannot run on this cluster, on whatever machine.

    Raises:
        SpecError: The job's number of ranks differs from the cluster's number of devices, or the job specifies its own
            link, is elastic, needs a GPU, or needs shared memory.
    """
    if cluster.num_devices != job.world_size:
        raise SpecError(
            f"world_size={job.world_size} does not match the {plural(cluster.num_devices, 'rank')} of "
            f"{cluster.name}; use world_size={cluster.num_devices}, or other nodes or per_node"
        )
    if job.elastic is not None:
        raise SpecError(
            f"elastic={job.elastic.label!r} cannot be combined with an emulated cluster, which has a fixed number of "
            "devices; use elastic=None, or train on this machine"
        )
    cluster.check_job(job)
    if job.device == "cuda":
        raise SpecError("device='cuda' does not run on an emulated cluster; use device='cpu' or 'auto'")
    if job.transport in {"shm", "cuda-ipc"} and len(cluster.nodes) > 1:
        raise SpecError(
            f"transport={job.transport!r} does not reach across the {len(cluster.nodes)} emulated nodes; use 'auto' or "
            "'tcp'"
        )
