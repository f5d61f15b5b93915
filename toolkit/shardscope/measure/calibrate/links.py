"""Latency and bandwidth between each pair of nodes of an emulated cluster, each over a TCP connection of its own."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from itertools import permutations
from typing import Any

from shardscope.calibration.host_calibration import Constant
from shardscope.errors import LaunchError
from shardscope.measure.calibrate import pair_speed
from shardscope.runtime.emulated import EmulatedNetwork
from shardscope.spec.cluster import EmulatedCluster

_SECONDS = 0.3
"""Time for which a pair of nodes sends at the nominal rate of its links."""
_LEAST_BYTES, _MOST_BYTES = 1 << 20, 1 << 26
_MOST_SECONDS = 1.0
"""Maximum time for which a pair sends, in seconds; slow links send fewer than `_LEAST_BYTES`."""
_MOST_PAIRS = 30
"""Maximum number of ordered pairs that are all measured; with more, only neighbours in a ring are measured."""
_NOISE = 0.2
"""Half width of an interval, relative to the value: the variation of a single measurement of a pair."""
_PATIENCE_S = 30.0


def pair_constants(cluster: EmulatedCluster) -> list[Constant]:
    """Return the latency and bandwidth constants for each pair of nodes; none with a single node.

    Raises:
        LaunchError: The cluster cannot be emulated here, or two nodes cannot reach each other.
    """
    if len(cluster.nodes) == 1:
        return []
    with EmulatedNetwork(cluster) as network:
        return [row for pair in _pairs(len(cluster.nodes)) for row in _measured(network, pair)]


def _pairs(nodes: int) -> list[tuple[int, int]]:
    pairs = list(permutations(range(nodes), 2))
    return pairs if len(pairs) <= _MOST_PAIRS else [(node, (node + 1) % nodes) for node in range(nodes)]


def _num_bytes(rate: float) -> int:
    """Return how many bytes to send over a link with this nominal rate, in bytes per second."""
    least = min(_LEAST_BYTES, rate * _MOST_SECONDS)
    return int(min(max(rate * _SECONDS, least), _MOST_BYTES))


def _measured(network: EmulatedNetwork, pair: tuple[int, int]) -> Iterator[Constant]:
    source, target = pair
    nodes = network.cluster.nodes
    rate = min(nodes[source].upload, nodes[target].download, network.cluster.rack_bandwidth or float("inf"))
    num_bytes = _num_bytes(rate)
    address = network.cluster.address(target)
    program = [sys.executable, "-I", "-S", pair_speed.__file__]
    pipe: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL, "text": True}
    with network.popen(target, [*program, "receive", address], **pipe) as receiver:
        try:
            assert receiver.stdout is not None
            port = receiver.stdout.readline().strip()
            with network.popen(source, [*program, "send", address, port, str(num_bytes)], **pipe) as sender:
                latency, _ = sender.communicate(timeout=_PATIENCE_S)
            bandwidth, _ = receiver.communicate(timeout=_PATIENCE_S)
            values = {"pair_latency_s": float(latency), "pair_bandwidth": float(bandwidth)}
        except (ValueError, subprocess.TimeoutExpired):
            raise LaunchError(f"node {source} cannot reach node {target} of the emulated cluster") from None
        finally:
            receiver.kill()
    for name, value in values.items():
        yield Constant(
            name=name, value=value, low=value * (1 - _NOISE), high=value * (1 + _NOISE), nodes=pair
        )
