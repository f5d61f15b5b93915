"""Compute, memory and link rates that convert a step's operation and byte counts into seconds."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from shardscope.machine import can_share_memory, usable_cores
from shardscope.prediction.step.machine import Machine
from shardscope.prediction.this_machine import core_speed
from shardscope.spec import Job
from shardscope.spec.calibration import Calibration
from shardscope.spec.cluster import Cluster, EmulatedCluster
from shardscope.spec.job import IN_LAYOUTS
from shardscope.spec.strategy import Work

PRODUCTS, ELEMENTWISE = 0.82, 0.11
"""Speeds of torch's matrix products and of its other operations in a training step on a CPU, as fractions of the speed
that NumPy reaches on one core."""
OPERATION_S = 68e-6
"""Fixed time per operation, in seconds, independent of its size; includes the trainer's overhead."""
MESSAGES = {"tcp": (7.3e8, 3.1e-3), "shm": (2.1e9, 1.4e-3)}
"""By transport: bandwidth from one rank to another on the same machine, in bytes per second, and time per message, in
seconds. Both include the time that ranks wait for each other because they share cores."""
# Over TCP: fitted to 40 jobs on 2 cores (8 models, 5 strategies, 1 and 2 ranks; torch 2.13), whose predicted step times
# are 0.72 to 1.31 times the measured ones; tests/benchmarks/job_time.py compares 16 other jobs (MAPE 24 %). Through
# shared memory: these, times the ratios of fits to 24 jobs that ran over both (4 models, 6 strategies, 2 ranks).


class RankRates(NamedTuple):
    """Compute, memory and link rates of one rank."""

    flops: float
    """FLOP/s in matrix products."""
    bandwidth: float
    """Bytes per second that operations other than matrix products read and write."""
    operation_s: float
    """Fixed time per operation, in seconds, independent of its size."""
    step_s: float
    """Fixed time per step, in seconds."""
    link: float
    """Bytes per second that the rank can send."""
    message_s: float
    """Time per message, in seconds."""
    source: str
    emulated_flops: float | None = None
    """FLOP/s at which passes are computed, whatever else they do; None unless a processor is emulated."""
    update_bandwidth: float | None = None
    """Bytes per second of updates on an emulated processor; None for `bandwidth`."""

    @classmethod
    def of_this_machine(
        cls, job: Job, work: Sequence[Work], *, emulated: EmulatedCluster | None = None
    ) -> RankRates:
        """Return the rates of one rank of `job` on this machine, whose cores the ranks share.

        Ranks that wait in a schedule leave their core to others: a pipeline that mostly waits is not slowed down by few
        cores, and a smaller bubble then gains little. The job's link, if it has one, limits the rate of sending.
        Predicted times can be off by a factor of two, because the constants of this module were fitted on another
        machine.

        Args:
            job: The job.
            work: Work of each rank.
            emulated: The emulated cluster that the ranks run on: between several nodes, its slowest link carries TCP,
                and its largest slowdown includes the time that ranks wait for a core.
        """
        speed = core_speed()
        computing = sum(each.computing for each in work) / max(each.computing + each.waiting for each in work)
        cores = usable_cores() / max(1.0, computing)
        share = min(job.threads, cores)
        waits = max(1.0, 1.0 / cores)
        if emulated is not None:
            share = min(share, job.threads / emulated.slowdown)
        limit = job.link if emulated is None else emulated.link
        bandwidth, latency = (np.inf, 0.0) if limit is None else (limit.bandwidth, limit.latency_s)
        between_nodes = emulated is not None and emulated.link is not None
        on_tcp = job.transport == "tcp" or between_nodes or not can_share_memory()
        loopback, message_s = MESSAGES["tcp" if on_tcp else "shm"]
        return cls(
            flops=PRODUCTS * speed.flops * share,
            bandwidth=ELEMENTWISE * speed.bandwidth * share,
            operation_s=OPERATION_S * max(waits, 1.0 if emulated is None else emulated.slowdown),
            step_s=0.0,
            link=min(loopback / waits, bandwidth),
            message_s=message_s + latency,
            source="this machine: NumPy's kernels, timed",
            emulated_flops=None if emulated is None else emulated.flops,
            update_bandwidth=None if emulated is None else emulated.memory_bandwidth,
        )

    @classmethod
    def of_cluster(cls, job: Job, cluster: Cluster, calibration: Calibration) -> RankRates:
        """Return the rates of one device of `cluster`, with the link rate of the slowest link between the ranks.

        Raises:
            SpecError: The device supports none of the dtypes of the job's precision.
        """
        machine = Machine.of(cluster, calibration, IN_LAYOUTS.get(job.precision, "fp32"))
        link, latency = (float(figure) for figure in machine.link(job.world_size, 1))
        return cls(
            flops=machine.matmul_rate / (2.0 if job.precision == "fp64" else 1.0),
            bandwidth=machine.memory_rate,
            operation_s=calibration.launch_s,
            step_s=calibration.step_s,
            link=link,
            message_s=latency + calibration.collective_s,
            source=f"rates: {calibration.name}",
        )
