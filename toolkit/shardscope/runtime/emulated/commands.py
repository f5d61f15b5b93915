"""The `ip` and `tc` commands that set up the links of an emulated cluster; pure functions.

Each node has an interface ``eth0``, whose other end is the port ``nN`` of its rack's switch. A token bucket (`tbf`) at
each end limits one direction. With several racks, the ports ``upR`` and ``downR`` join rack R's switch to the core.
If the kernel has `netem`, the latency is added where packets leave the switch: packets delayed in the node would count
as unsent, and TCP limits the number of unsent packets.
"""

from __future__ import annotations

from typing import Any

from shardscope.spec.cluster import EmulatedCluster

FRAME, ON_WIRE = 1514, 1538
"""Bytes of a full frame as the kernel counts them, and on the wire, with checksum, preamble and gap."""
_PAYLOAD = 1448
"""Bytes of payload in a full frame."""
_LEAST_BURST, _LEAST_BURST_S = 5000, 250e-6
"""Minimum burst of a token bucket, in bytes and in seconds at its rate; the kernel's timers may be that late."""
_QUEUE_BYTES = 32 << 20
"""Buffer of each port, in bytes: deep enough that many nodes can send to one node without packet loss."""
_SEGMENT_BYTES, _SEGMENT_S = (2 * _PAYLOAD, 65536), 500e-6
"""Minimum and maximum bytes that TCP hands to an interface at once, and the time for which they may occupy the link.
Handling a segment takes as much CPU time as handling a frame, so small segments overload the cores if many nodes share
few cores. Large segments make other connections wait."""
_AFTER_IDLE = "/proc/sys/net/ipv4/tcp_slow_start_after_idle"
"""Setting that makes TCP return to slow start after a pause, as between two steps; clusters commonly turn it off."""
_CONGESTION = "/proc/sys/net/ipv4/tcp_congestion_control"
"""Setting for TCP's congestion control. Reno is in every kernel and allowed without root; without loss, it fills a link
like CUBIC. BBR would keep the reduced rate from times at which several nodes sent to one."""
_UNSENT, _UNSENT_SEGMENTS = "/proc/sys/net/ipv4/tcp_limit_output_bytes", 2
"""Setting that limits the bytes that each connection has in its node's queue, and the limit in segments. The kernel's
default grows with a connection's rate, so that one of several equal connections soon takes most of the link."""
_MOST_DELAYED = 200_000
"""Packets that netem holds at most: more than are in flight on any link that can be emulated."""


def bucket(bytes_per_s: float) -> str:
    """Return the arguments of `tc` for a token bucket that lets Ethernet frames of this rate pass.

    The bucket holds a whole segment of a node with this rate, since the kernel would cut a larger segment into frames.
    """
    bits = round(8 * bytes_per_s * FRAME / ON_WIRE)
    whole_segment = (segment_bytes(bytes_per_s) // _PAYLOAD + 1) * FRAME
    burst = max(_LEAST_BURST, whole_segment, round(bytes_per_s * _LEAST_BURST_S))
    return f"tbf rate {bits}bit burst {burst}b limit {_QUEUE_BYTES}b"


def network_plan(cluster: EmulatedCluster) -> dict[str, Any]:
    """Return the plan that the hub carries out: commands by setup stage, in which ``HUB`` stands for the hub's pid."""
    nodes = range(len(cluster.nodes))
    ports = {f"n{node}": cluster.nodes[node].download for node in nodes}
    return {
        "switches": [line for rack in range(cluster.racks) for line in _bridge(f"rack{rack}")]
        + (_core(cluster) if cluster.racks > 1 else []),
        "nodes": [_node(cluster, node) for node in nodes],
        "ports": [f"link set n{node} master rack{cluster.rack_of(node)} up" for node in nodes],
        "limited": [*_uplinks(cluster), *(f"qdisc add dev {port} root {bucket(rate)}" for port, rate in ports.items())],
        "delayed": [*_uplinks(cluster), *(line for port in ports.items() for line in _delayed(cluster, *port))],
        "delays": cluster.latency_s > 0,
    }  # fmt: skip


def _bridge(name: str) -> list[str]:
    return [
        f"link add {name} type bridge forward_delay 0 stp_state 0",
        f"link set {name} addrgenmode none up",
    ]


def _core(cluster: EmulatedCluster) -> list[str]:
    lines = _bridge("core")
    for rack in range(cluster.racks):
        lines += [
            f"link add up{rack} type veth peer name down{rack}",
            f"link set up{rack} addrgenmode none master rack{rack} up",
            f"link set down{rack} addrgenmode none master core up",
        ]
    return lines


def _uplinks(cluster: EmulatedCluster) -> list[str]:
    rate = cluster.rack_bandwidth
    if rate is None:
        return []
    ports = [f"{way}{rack}" for rack in range(cluster.racks) for way in ("up", "down")]
    return [f"qdisc add dev {port} root {bucket(rate)}" for port in ports]


def _node(cluster: EmulatedCluster, node: int) -> dict[str, Any]:
    address, segment = cluster.address(node), segment_bytes(cluster.nodes[node].upload)
    return {
        "host": address,
        "ip": [
            "link set lo up",
            f"link add eth0 type veth peer name n{node} netns HUB",
            "link set eth0 addrgenmode none",
            f"addr add {address}/24 dev eth0",
            "link set eth0 up",
        ],
        "segments": [f"link set eth0 gso_max_size {segment}"],
        "tc": [f"qdisc add dev eth0 root {bucket(cluster.nodes[node].upload)}"],
        "settings": {_AFTER_IDLE: "0", _CONGESTION: "reno", _UNSENT: f"{_UNSENT_SEGMENTS * segment}"},
    }


def segment_bytes(bytes_per_s: float) -> int:
    """Return the maximum bytes that TCP hands to an interface of this rate at once."""
    low, high = _SEGMENT_BYTES
    return min(high, max(low, round(bytes_per_s * _SEGMENT_S)))


def _delayed(cluster: EmulatedCluster, port: str, rate: float) -> list[str]:
    delay = round(cluster.latency_s * 1e6)
    return [
        f"qdisc add dev {port} root handle 1: netem delay {delay}us limit {_MOST_DELAYED}",
        f"qdisc add dev {port} parent 1:1 handle 10: {bucket(rate)}",
    ]
