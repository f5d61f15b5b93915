"""Devices and links. All sizes in bytes, all rates in bytes or FLOP a second, all times in seconds."""

from __future__ import annotations

from pydantic import Field, NonNegativeFloat, PositiveFloat

from shardscope.spec._base import Spec


class Device(Spec):
    """An accelerator, or a CPU that stands in for one."""

    name: str
    memory_bytes: PositiveFloat
    peak_flops: dict[str, PositiveFloat]
    """FLOP/s of dense matrix products by format: ``fp32``, ``tf32``, ``fp16``, ``bf16``, ``fp8``."""
    memory_bandwidth: PositiveFloat
    """Bytes a second between the device and its own memory."""
    power_w: PositiveFloat | None = None
    host_bandwidth: PositiveFloat = 25e9
    """Bytes a second to the host's memory, each way (PCIe or NVLink-C2C)."""
    source: str = Field(min_length=1)
    """Where the figures come from."""


class Link(Spec):
    """What joins devices."""

    name: str
    bandwidth: PositiveFloat
    """Bytes a second that one device can send while it receives as many (per device, one way)."""
    latency_s: NonNegativeFloat
    source: str = Field(min_length=1)
