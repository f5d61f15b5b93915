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

PRODUCTS, ELEMENTWISE = 0.55, 0.12
"""Of one core's speed as NumPy reaches it, that a training step's own operations do in torch on a CPU."""
OPERATION_S = 12e-6
"""Of each operation's forward or backward, in torch on a CPU, whatever its size."""
STEP_S = 1e-3
"""Once a step on a CPU: data, events, the optimizer's own calls."""
LOOPBACK, MESSAGE_S = 1e9, 150e-6
"""Bytes a second that a rank sends to another on the same machine, and seconds of each message, over gloo."""


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

        The shares of a core's speed and the fixed costs were measured on 2 cores with torch 2.13 and gloo.
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
            step_s=STEP_S * waits,
            link=min(LOOPBACK / waits, bandwidth),
            message_s=MESSAGE_S * waits + latency,
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
