"""Clusters emulated on one Linux machine: a network namespace per node, joined by links of limited rate.

    network.py       the handle of an emulated network; starts the hub, enters nodes, reads the links' counters
    hub.py           the process that holds all namespaces and links; they disappear with it
    commands.py      the `ip` and `tc` commands that set up the links of a cluster
    coordinator.py   the agent of a run on such a cluster: starts the agents of the nodes and merges their results
    node.py          the agent of one node: PyTorch elastic with the c10d rendezvous, as on one of several machines
    support.py       whether this machine can emulate clusters, and why not

Namespaces have no names and exist as long as a process is in them or holds them open. The hub holds them open, the
agents and ranks are in them, and all of these end with the process that started the hub. So nothing remains in the
host's network, in ``/run/netns`` or in its mounts, not even after ``kill -9``.
"""

from shardscope.runtime.emulated.network import EmulatedNetwork
from shardscope.runtime.emulated.support import why_not_emulated

__all__ = ["EmulatedNetwork", "why_not_emulated"]
