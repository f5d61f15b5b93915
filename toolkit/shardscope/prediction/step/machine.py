"""Calibrated rates of one machine: peak rates from the catalogue times measured efficiencies; memory of its devices."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from shardscope.analytic.communication.ring import (
    is_inside_node,
    members_per_node,
    ring_time,
    spanning_link,
)
from shardscope.analytic.layouts import Layouts
from shardscope.analytic.memory import MemoryParts, device_memory, tensor_room
from shardscope.analytic.memory.frameworks import FRAMEWORKS, Framework
from shardscope.analytic.memory.offload import host_bytes_per_device
from shardscope.calibration.calibration import Calibration
from shardscope.calibration.software import memory_model, software_of
from shardscope.errors import SpecError
from shardscope.spec.cluster import Cluster, Device
from shardscope.spec.model import Transformer

Floats = npt.NDArray[np.float64]

FORMATS = {
    "fp32": ("tf32", "fp32"),
    "bf16-autocast": ("bf16", "fp16", "fp32"),
    "fp16-autocast": ("fp16", "bf16", "fp32"),
    "fp16-mixed": ("fp16", "bf16", "fp32"),
    "bf16-mixed": ("bf16", "fp16", "fp32"),
    "fp8-mixed": ("fp8",),
}
"""Dtypes for the matrix products of each precision recipe; the first one that the device supports is used.

One 16-bit dtype can replace another. An 8-bit dtype has no replacement, because the recipe would then be the same as
`bf16-mixed`.
"""


class Machine(NamedTuple):
    """Rates of a cluster's devices and links under a calibration, for one precision recipe."""

    cluster: Cluster
    calibration: Calibration
    format: str
    """Dtype of most matrix products: the recipe's, or the closest one that the device supports."""
    matmul_rate: float
    """FLOP/s of very large matrix products in the recipe's dtype."""
    wide_rate: float
    """FLOP/s of very large matrix products in the dtype of attention and output projection, never an 8-bit dtype."""
    attention_rate: float
    """FLOP/s of fused attention kernels."""
    unfused_rate: float
    """FLOP/s of the matrix products in unfused attention."""
    memory_rate: float
    """Bytes per second that element-wise operators read and write."""
    value_bytes: int
    """Bytes of one activation element."""
    peak: float
    """Peak FLOP/s of the device in the recipe's dtype, which is the denominator of MFU."""

    @property
    def framework(self) -> Framework:
        """Conventions of the framework that the calibration's software uses."""
        return FRAMEWORKS[memory_model(self.calibration.software)]

    @property
    def has_megatron_softmax(self) -> bool:
        """Whether the calibration's software is predicted as if it had Megatron's fused softmax kernel.

        This is so for DeepSpeed, because it most often runs Megatron's models. Hugging Face models under DeepSpeed, and
        Megatron-LM of 2019, do not have the kernel: see `tests/published/tables/volta.py`.
        """
        return software_of(self.calibration.software or "megatron-core").family != "fsdp"

    def utilization(self, flops: float, num_devices: int, step_time_s: float) -> float:
        """Return the fraction of the devices' peak FLOP/s at which a step executes `flops`."""
        return flops / (self.peak * num_devices * step_time_s)

    @classmethod
    def of(cls, cluster: Cluster, calibration: Calibration, precision: str) -> Machine:
        """Return the rates for a precision recipe.

        Args:
            cluster: The cluster.
            calibration: The machine's constants.
            precision: A precision recipe of `spec.layout`.

        Raises:
            SpecError: The device supports none of the recipe's dtypes.
        """
        device = cluster.device
        name = next((name for name in FORMATS[precision] if name in device.peak_flops), None)
        if name is None:
            raise SpecError(_unsupported(device, precision))
        wide = "bf16-mixed" if name == "fp8" else precision
        wide_peak = device.peak_flops[next(n for n in FORMATS[wide] if n in device.peak_flops)]
        share = calibration.fp8_efficiency if name == "fp8" else calibration.matmul_efficiency
        return cls(
            cluster=cluster,
            calibration=calibration,
            format=name,
            matmul_rate=device.peak_flops[name] * share,
            wide_rate=wide_peak * calibration.matmul_efficiency,
            attention_rate=wide_peak * calibration.attention_efficiency,
            unfused_rate=wide_peak * calibration.unfused_efficiency,
            memory_rate=device.memory_bandwidth * calibration.memory_efficiency,
            value_bytes=4 if precision == "fp32" else 2,
            peak=device.peak_flops[name],
        )

    def link(self, group: npt.ArrayLike, stride: npt.ArrayLike) -> tuple[Floats, Floats]:
        """Return the bandwidth of a group's ring, in bytes per second, and its latency per ring step, in seconds.

        NCCL uses trees if the W - 1 steps of a ring would take longer, so total latency grows as log2(W). Each of the
        W - 1 ring steps is therefore charged log2(W) / (W - 1) link latencies.

        Args:
            group: Number of ranks in the group, W.
            stride: Distance between neighbouring ranks of the group, in devices.
        """
        cal, cluster = self.calibration, self.cluster
        link = spanning_link(cluster, group, stride)
        ranks = np.asarray(group, float)
        leaving = members_per_node(cluster, group, stride) * cluster.inter.bandwidth * cal.inter_efficiency
        within = cal.intra_rate(cluster.intra)
        rate = np.where(is_inside_node(cluster, group, stride), within, np.minimum(within, leaving))
        steps = np.ceil(np.log2(np.maximum(ranks, 1.0)))
        return np.asarray(rate), np.asarray(link.latency * steps / np.maximum(ranks - 1.0, 1.0))

    def started(self, group: npt.ArrayLike) -> Floats:
        """Return the time to launch one collective, in seconds; 0 for a group of one rank."""
        return np.where(np.asarray(group) > 1, self.calibration.collective_s, 0.0)

    def collective(
        self, op: str, num_bytes: npt.ArrayLike, group: npt.ArrayLike, stride: npt.ArrayLike
    ) -> Floats:
        """Return the time of one collective, in seconds, including its launch.

        Args:
            op: Name of the collective, such as ``all_reduce``.
            num_bytes: Size of the whole tensor, in bytes.
            group: Number of ranks in the group.
            stride: Distance between neighbouring ranks of the group, in devices.
        """
        rate, latency = self.link(group, stride)
        return np.asarray(ring_time(op, num_bytes, group, rate, latency) + self.started(group))


def _unsupported(device: Device, precision: str) -> str:
    """Return the error message for a device that supports none of a recipe's dtypes; it lists the supported recipes."""
    able = [name for name, formats in FORMATS.items() if any(one in device.peak_flops for one in formats)]
    known = ", ".join(device.peak_flops) or "no dtype"
    way_out = f"use precision={' or '.join(map(repr, able))}" if able else "set the device's peak_flops"
    return (
        f"precision={precision!r} needs matrix products in {' or '.join(FORMATS[precision])}, but device "
        f"{device.name!r} supports {known}; {way_out}"
    )


def memory_with(model: Transformer, layouts: Layouts, cluster: Cluster, software: str) -> MemoryParts:
    """Return bytes by type of memory; offloaded bytes that exceed a device's share of host memory are on drives."""
    room = host_bytes_per_device(cluster)
    return device_memory(
        model, layouts, framework=memory_model(software), device=cluster.device, host_capacity=room
    )


def room_on(cluster: Cluster, software: str, *, largest_bytes: float = 0.0) -> float:
    """Return the bytes that tensors can take on a device of a cluster, with a software; see `tensor_room`."""
    return tensor_room(cluster.device, memory_model(software), largest_bytes=largest_bytes)
