"""Defaults for a device: its usual node, that node's links, and its price."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from shardscope.errors import SpecError, quoted
from shardscope.spec import catalogue
from shardscope.spec.cluster.parts import Device
from shardscope.spec.link import Link, is_rate


def device_and_node(name: str | Device) -> tuple[Device, Mapping[str, Any]]:
    """Return a device from the catalogue with its usual node, or the device of a node type with that node.

    A user-defined device has no usual node, and therefore no defaults.

    Raises:
        SpecError: Neither a device nor a node has this name.
    """
    if isinstance(name, Device):
        return name, _node_of(name.name) if catalogue.has("devices", name.name) else {}
    if isinstance(name, str) and catalogue.has("nodes", name):
        node = catalogue.lookup("nodes", name, field="node")[1]
        return Device.of(node["device"]), node
    if not isinstance(name, str) or not catalogue.has("devices", name):
        names = (*catalogue.table("devices"), *catalogue.table("nodes"))
        raise catalogue.unknown("device or node", name, names)
    return Device.of(name), _node_of(name)


def _node_of(device: str) -> Mapping[str, Any]:
    usual = catalogue.lookup("devices", device, field="device")[1]["node"]
    return catalogue.lookup("nodes", usual, field="node")[1]


def intra_link(link: str | Link | None, node: Mapping[str, Any]) -> Link:
    """Return the link inside a node: the given link, or else the node's own."""
    return link_of(link, "intra", Link.of(node["intra"]) if node else None)


def inter_link(link: str | Link | None, ports: int | None, per_node: int, node: Mapping[str, Any]) -> Link:
    """Return the link between nodes: the given link, or else the node's own, with one device's share of its bandwidth.

    The node's own ports are divided among all its devices, even if the cluster uses only some of them.
    """
    found = link_of(link, "inter", Link.of(node["inter"]) if node else None)
    if ports is not None:
        return found.shared(ports, per_node)
    return found.shared(node["ports"], node["per_node"]) if link is None else found


def link_of(link: str | Link | None, field: str, usual: Link | None) -> Link:
    """Return the link that a name or a bandwidth describes, or the usual link for None.

    A bandwidth is combined with the latency of the usual link.
    """
    if isinstance(link, Link):
        return link
    if link is None:
        if usual is None:
            raise SpecError(
                f"{field}=None is not valid for a user-defined device; give {field}='nvlink-4' or a Link"
            )
        return usual
    if usual is None and is_rate(link):
        raise SpecError(
            f"{field}={quoted(link)} is a bandwidth, which needs a latency; "
            f"give Link.of({quoted(link)}, latency_s='5 us')"
        )
    return Link.of(link, latency_s=usual.latency_s if usual and is_rate(link) else None, field=field)


def usual_price(device: str) -> tuple[float | None, str]:
    """Return the price per device and hour in US dollars (None if unknown), and the price's source with its date."""
    if not catalogue.has("prices", device):
        return None, ""
    entry = catalogue.lookup("prices", device, field="device")[1]
    return entry["usd_per_device_hour"], f"{entry['source']} ({entry['date']})"
