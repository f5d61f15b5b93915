"""Worst cases over unequal nodes: the device and the link that every node matches or exceeds."""

from __future__ import annotations

from collections.abc import Sequence

from shardscope.errors import SpecError
from shardscope.spec.cluster.parts import Device
from shardscope.spec.link import Link


def slowest_device(devices: Sequence[Device]) -> Device:
    """Return a device with the worst value of every specification: lowest memory and rates, highest power limit.

    The device has the dtypes that all devices support. Its power limit is None if that of any device is unknown.

    Raises:
        SpecError: The devices have no dtype in common.
    """
    if len({device.name for device in devices}) == 1:
        return devices[0]
    common = [name for name in devices[0].peak_flops if all(name in other.peak_flops for other in devices)]
    names = " + ".join(dict.fromkeys(device.name for device in devices))
    if not common:
        raise SpecError(f"groups of {names} have no dtype in common; use devices that share one")
    powers = [device.power_w for device in devices]
    return Device(
        name=names,
        memory_bytes=min(device.memory_bytes for device in devices),
        context_bytes=max(device.context_bytes for device in devices),
        peak_flops={name: min(device.peak_flops[name] for device in devices) for name in common},
        architecture=devices[0].architecture if len({device.architecture for device in devices}) == 1 else "",
        memory_bandwidth=min(device.memory_bandwidth for device in devices),
        power_w=None if None in powers else max(power for power in powers if power is not None),
        host_bandwidth=min(device.host_bandwidth for device in devices),
        source="the worst value of each specification of " + names,
        recalled=tuple(sorted({field for device in devices for field in device.recalled})),
    )


def slowest_link(links: Sequence[Link]) -> Link:
    """Return the link with the lowest bandwidth; in a tie, the one with the highest latency."""
    return min(links, key=lambda link: (link.bandwidth, -link.latency_s))
