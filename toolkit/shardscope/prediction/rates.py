"""What turns a step's counts into seconds: on this machine, or on a cluster under a calibration."""

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
"""Of one core's speed as NumPy reaches it, that a training step's own operations do in torch on a CPU."""
OPERATION_S = 68e-6
"""Of each operation, whatever its size, with what the trainer does around it."""
LOOPBACK, MESSAGE_S = 7.3e8, 3.1e-3
"""Bytes a second that a rank sends to another on the same machine over gloo, and seconds of each message, waits of
ranks that share cores included."""
# Fitted to 40 jobs on 2 cores (8 models, 5 strategies, 1 and 2 ranks; torch 2.13), whose steps come out at 0.72 to 1.31
# of what was measured; tests/benchmarks/job_time.py lays 16 others beside (MAPE 24 %).


class Rates(NamedTuple):
    """Of one rank."""

    flops: float
    """FLOP/s of matrix products."""
    bandwidth: float
    """Bytes a second that all other operations read and write."""
    operation_s: float
    """Of each operation, whatever its size."""
    step_s: float
    """Once a step."""
    link: float
    """Bytes a second that it sends."""
    message_s: float
    source: str

    @classmethod
    def of_this_machine(cls, job: Job) -> Rates:
        """Of a rank among all those of the job, which share the cores; no faster than the job's link.

        Right within a factor of two, as the constants of another machine differ.
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
    def of_cluster(cls, job: Job, cluster: Cluster, calibration: Calibration) -> Rates:
        """Of a device of a cluster; messages go over the slowest link between the ranks.

        Raises:
            SpecError: The device has none of the formats of the job's precision.
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
