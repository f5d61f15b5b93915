"""Calibrated rates of one machine: the catalogue's peak rates times the measured share."""

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
from shardscope.errors import SpecError
from shardscope.spec.calibration import Calibration
from shardscope.spec.cluster import Cluster, Device

Floats = npt.NDArray[np.float64]

FORMATS = {
    "fp32": ("tf32", "fp32"),
    "bf16-autocast": ("bf16", "fp16", "fp32"),
    "fp16-autocast": ("fp16", "bf16", "fp32"),
    "fp16-mixed": ("fp16", "bf16", "fp32"),
    "bf16-mixed": ("bf16", "fp16", "fp32"),
    "fp8-mixed": ("fp8",),
}
"""Number formats of a recipe's matrix products, best first; the first that the device supports is used.

One 16-bit format can replace another. An 8-bit format has no replacement: without it the recipe would be
`bf16-mixed`.
"""


class Machine(NamedTuple):
    """A cluster under a calibration, for one precision recipe."""

    cluster: Cluster
    calibration: Calibration
    format: str
    """Format of most matrix products: the recipe's, or the nearest that the device supports."""
    matmul_rate: float
    """FLOP/s of very large matrix products in the recipe's format."""
    wide_rate: float
    """FLOP/s of very large products in 16 bits: attention and the output projection do not run in 8."""
    attention_rate: float
    unfused_rate: float
    memory_rate: float
    value_bytes: int
    """Bytes of one activation element."""
    peak: float
    """Peak FLOP/s of the device in the recipe's format: the denominator of MFU."""

    @classmethod
    def of(cls, cluster: Cluster, calibration: Calibration, precision: str) -> Machine:
        """Return the rates for a precision recipe of `spec.layout`."""
        device = cluster.device
        name = next((name for name in FORMATS[precision] if name in device.peak_flops), None)
        if name is None:
            raise SpecError(_lacks(device, precision))
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
        """Bandwidth of a group's ring in bytes per second, and latency in seconds per ring step.

        NCCL uses trees where a ring's W - 1 steps would take longer, so the total latency grows as log2(W): a step
        costs log2(W) / (W - 1) latencies.
        """
        cal, cluster = self.calibration, self.cluster
        link = spanning_link(cluster, group, stride)
        ranks = np.asarray(group, float)
        leaving = members_per_node(cluster, group, stride) * cluster.inter.bandwidth * cal.inter_efficiency
        within = cluster.intra.bandwidth * cal.intra_efficiency
        rate = np.where(is_inside_node(cluster, group, stride), within, np.minimum(within, leaving))
        steps = np.ceil(np.log2(np.maximum(ranks, 1.0)))
        return np.asarray(rate), np.asarray(link.latency * steps / np.maximum(ranks - 1.0, 1.0))

    def started(self, group: npt.ArrayLike) -> Floats:
        """Seconds to launch one collective; 0 for a group of one."""
        return np.where(np.asarray(group) > 1, self.calibration.collective_s, 0.0)

    def collective(
        self, op: str, num_bytes: npt.ArrayLike, group: npt.ArrayLike, stride: npt.ArrayLike
    ) -> Floats:
        """Seconds of one collective, launch included."""
        rate, latency = self.link(group, stride)
        return np.asarray(ring_time(op, num_bytes, group, rate, latency) + self.started(group))


def _lacks(device: Device, precision: str) -> str:
    """Error message for a device without any of a recipe's formats; lists the recipes that it supports."""
    able = [name for name, formats in FORMATS.items() if any(one in device.peak_flops for one in formats)]
    known = ", ".join(device.peak_flops) or "no format"
    way_out = f"use precision={' or '.join(map(repr, able))}" if able else "give its peak_flops"
    return (
        f"precision={precision!r} multiplies in {' or '.join(FORMATS[precision])}, and device {device.name!r} "
        f"in {known}; {way_out}"
    )
