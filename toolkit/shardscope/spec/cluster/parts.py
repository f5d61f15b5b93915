"""Devices and links. All sizes in bytes, all rates in bytes or FLOP a second, all times in seconds."""

from __future__ import annotations

from pydantic import Field

from shardscope.errors import SpecError
from shardscope.spec import catalogue
from shardscope.spec._base import Spec
from shardscope.spec.units import Bandwidth, Bytes, Flops, Seconds, Watts, parse, positive


class Device(Spec):
    """An accelerator, or a CPU that stands in for one. Quantities may be texts with units: ``"80 GiB"``."""

    name: str
    memory_bytes: Bytes
    """What one process can allocate, as the driver reports it where that is known, else what is marketed."""
    peak_flops: dict[str, Flops]
    """FLOP/s of dense matrix products by format: ``fp32``, ``tf32``, ``fp16``, ``bf16``, ``fp8``."""
    memory_bandwidth: Bandwidth
    """Bytes a second between the device and its own memory."""
    power_w: Watts | None = None
    """Most it may draw."""
    host_bandwidth: Bandwidth = 25e9
    """Bytes a second to the host's memory, each way (PCIe or NVLink-C2C)."""
    source: str = Field(min_length=1)
    """Where the figures come from."""
    recalled: tuple[str, ...] = ()
    """Fields whose figures were written from memory, and not confirmed in the source."""

    @classmethod
    def of(cls, name: str) -> Device:
        """A device of the catalogue; `Device.names` lists them.

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


class Link(Spec):
    """What joins devices. Quantities may be texts with units: ``"200 Gbit/s"``, ``"5 us"``."""

    name: str
    bandwidth: Bandwidth
    """Bytes a second that one device can send while it receives as many (per device, one way)."""
    latency_s: Seconds
    """Of one message between neighbours."""
    source: str = Field(min_length=1)
    recalled: tuple[str, ...] = ()
    """Fields whose figures were written from memory, and not confirmed in the source."""

    @classmethod
    def of(cls, name: str, *, latency_s: float | str | None = None, field: str = "link") -> Link:
        """A link of the catalogue by its name, or any other by its rate, which then needs a latency.

        For network ports the bandwidth is one port's, one way; `shared` makes it a device's share.

        Args:
            name: ``"nvlink-4"``, ``"25GbE"``, or a rate with its unit, each way.
            latency_s: Seconds, or a text with its unit; None for the catalogue's.
            field: What an error calls the name.

        Example:
            >>> Link.of("25GbE").bandwidth
            3125000000.0
            >>> Link.of("200 Gbit/s", latency_s="5 us").bandwidth
            25000000000.0
        """
        if not is_rate(name):
            proper, fields = catalogue.lookup("links", name, field=field)
            link = cls(name=proper, **fields)
            return link if latency_s is None else link.replace(latency_s=latency_s)
        bandwidth = positive(parse(name, "bytes/s", field=field), field=field, given=name)
        if latency_s is None:
            raise SpecError(
                f"{field}={name!r} is a rate, which needs a latency; give latency_s='5 us' or the like"
            )
        return cls(name=name, bandwidth=bandwidth, latency_s=latency_s, source="given by the user")

    @classmethod
    def names(cls) -> tuple[str, ...]:
        """Names in the catalogue."""
        return tuple(catalogue.table("links"))

    def shared(self, ports: int, devices: int) -> Link:
        """One device's share when so many ports of this kind serve so many devices."""
        for field, count in (("ports", ports), ("devices", devices)):
            if count < 1:
                raise SpecError(f"{field}={count} is not valid: it should be 1 or more")
        if ports == devices:
            return self
        name = f"{ports} x {self.name} / {devices}"
        return self.replace(name=name, bandwidth=self.bandwidth * ports / devices)


def is_rate(name: object) -> bool:
    """Whether a text that stands for a link is a rate (``"200 Gbit/s"``) and no name (``"25GbE"``)."""
    return (
        isinstance(name, str)
        and name.strip()[:1] in set("+-.0123456789")
        and not catalogue.has("links", name)
    )
