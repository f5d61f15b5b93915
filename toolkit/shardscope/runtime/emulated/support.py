"""Whether this machine can emulate clusters."""

from __future__ import annotations

from shardscope.errors import LaunchError
from shardscope.runtime.emulated.network import EmulatedNetwork
from shardscope.spec.cluster import EmulatedCluster


def why_not_emulated() -> str:
    """Return why clusters cannot be emulated here, in one sentence; empty if they can. Tests it by setting one up."""
    try:
        with EmulatedNetwork(EmulatedCluster.of(nodes=1)):
            return ""
    except LaunchError as error:
        return str(error)
