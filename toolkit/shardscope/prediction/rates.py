"""Rates that turn a step's counts into seconds, on this machine or on a cluster under a calibration."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from shardscope.machine import usable_cores
from shardscope.prediction.step.machine import Machine
from shardscope.prediction.this_machine import core_speed
from shardscope.spec import Job
from shardscope.spec.calibration import Calibration
from shardscope.spec.cluster import Cluster
from shardscope.spec.job import IN_LAYOUTS

PRODUCTS, ELEMENTWISE = 0.82, 0.11
"""Share of the speed that NumPy reaches on one core, for a training step's operations in torch on a CPU."""
OPERATION_S = 68e-6
"""Seconds per operation, whatever its size, including the trainer's work around it."""
LOOPBACK, MESSAGE_S = 7.3e8, 3.1e-3
"""Bytes per second from one rank to another on the same machine over gloo, and seconds per message. Both include the
waits of ranks that share cores."""
# Fitted to 40 jobs on 2 cores (8 models, 5 strategies, 1 and 2 ranks; torch 2.13), whose predicted steps are 0.72 to
# 1.31 of the measured ones; tests/benchmarks/job_time.py compares 16 other jobs (MAPE 24 %).


class RankRates(NamedTuple):
    """Rates of one rank."""

    flops: float
    """FLOP/s of matrix products."""
    bandwidth: float
    """Bytes per second that all other operations read and write."""
    operation_s: float
    """Seconds per operation, whatever its size."""
    step_s: float
    """Seconds of fixed cost per step."""
    link: float
    """Bytes per second that the rank sends."""
    message_s: float
    source: str

    @classmethod
    def of_this_machine(cls, job: Job) -> RankRates:
        """Rates of one of the job's ranks, which share the cores; sending is at most as fast as the job's link.

        Accurate within a factor of two, as the constants of another machine differ.
        """
        speed = core_speed()
        cores = usable_cores() / job.world_size
        share = min(job.threads, cores)
        waits = max(1.0, 1.0 / cores)
        bandwidth, latency = (np.inf, 0.0) if job.link is None else (job.link.bandwidth, job.link.latency_s)
        return cls(
            flops=PRODUCTS * speed.flops * share,
            bandwidth=ELEMENTWISE * speed.bandwidth * share,
            operation_s=OPERATION_S * waits,
            step_s=0.0,
            link=min(LOOPBACK / waits, bandwidth),
            message_s=MESSAGE_S + latency,
            source="this machine: NumPy's kernels, timed",
        )

    @classmethod
    def of_cluster(cls, job: Job, cluster: Cluster, calibration: Calibration) -> RankRates:
        """Rates of one device of a cluster; messages take the slowest link between the ranks.

        Raises:
            SpecError: The device supports none of the formats of the job's precision.
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
