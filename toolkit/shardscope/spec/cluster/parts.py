"""Devices. All sizes are in bytes, all rates in bytes or FLOP per second."""

from __future__ import annotations

from pydantic import Field

from shardscope.spec import catalogue
from shardscope.spec._base import Spec
from shardscope.spec.units import Bandwidth, Bytes, Flops, Watts


class Device(Spec):
    """An accelerator, or a CPU that stands in for one. Quantities may be texts with units: ``"80 GiB"``."""

    name: str
    memory_bytes: Bytes
    """Bytes that one process can allocate: the driver's figure where it is known, else the marketed one."""
    peak_flops: dict[str, Flops]
    """FLOP/s of dense matrix products by format: ``fp32``, ``tf32``, ``fp16``, ``bf16``, ``fp8``."""
    memory_bandwidth: Bandwidth
    """Bytes per second between the device and its own memory."""
    power_w: Watts | None = None
    """Power limit, in watts."""
    host_bandwidth: Bandwidth = 25e9
    """Bytes per second to the host's memory, each way (PCIe or NVLink-C2C)."""
    source: str = Field(min_length=1)
    """Where the figures come from."""
    recalled: tuple[str, ...] = ()
    """Fields whose figures were written from memory and not confirmed in the source."""

    @classmethod
    def of(cls, name: str) -> Device:
        """A device from the catalogue; `Device.names` lists them.

        Example:
            >>> Device.of("a100-80gb").peak_flops["bf16"]
            312000000000000.0
        """
        proper, fields = catalogue.lookup("devices", name, field="device")
        return cls(name=proper, **{key: value for key, value in fields.items() if key != "node"})

    @classmethod
    def names(cls) -> tuple[str, ...]:
        """Names in the catalogue."""
        return tuple(catalogue.table("devices"))
