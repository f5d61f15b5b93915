"""Clusters of the published measurements: devices and links from the catalogue, networks as the authors describe them.

The authors state the bandwidth of a node's network cards, which may differ from that of the standard node in the
catalogue. None of them states the latency, so the catalogue's latency for InfiniBand is used.
"""

from __future__ import annotations

from shardscope.spec.cluster import Cluster, Device, Link

A100_80, H100 = Device.of("a100-80gb"), Device.of("h100-80gb")
V100_16, V100_32 = Device.of("v100-16gb"), Device.of("v100-32gb")
NVLINK3, NVLINK4 = Link.of("nvlink-3"), Link.of("nvlink-4")


def network(gbit_per_s: float, source: str) -> Link:
    """Return the link of one device: its share of its node's network cards, in Gbit/s."""
    latency = Link.of("infiniband-hdr").latency_s
    return Link(
        name=f"{gbit_per_s:g} Gbit/s", bandwidth=gbit_per_s * 1e9 / 8, latency_s=latency, source=source
    )


def cluster(device: Device, devices: int, *, intra: Link, inter: Link, per_node: int = 8) -> Cluster:
    """Return a cluster of whole nodes with at least `devices` devices, `per_node` on each."""
    nodes = -(-devices // per_node)
    return Cluster(
        name=f"{devices} x {device.name}",
        device=device,
        nodes=nodes,
        per_node=per_node,
        intra=intra,
        inter=inter,
    )
