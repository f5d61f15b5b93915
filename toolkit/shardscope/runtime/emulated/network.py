"""An emulated network: its hub process, how to enter its nodes, and the counters of its links."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any, NamedTuple, Self

from shardscope.errors import LaunchError
from shardscope.runtime.emulated import hub
from shardscope.runtime.emulated.commands import network_plan
from shardscope.spec.cluster import EmulatedCluster

INTERFACE = "eth0"
_PATIENCE_S = 5.0
_SETUP_S = 30.0
"""Time that the hub may take to set up a network, in seconds; 100 nodes take about 3 s."""
PACED_INSTEAD = (
    "emulate slower links without it: ss.Job(link=ss.Link(bandwidth='1 Gbit/s', latency='1 ms')), whose ranks pace "
    "their messages"
)


class LinkCounters(NamedTuple):
    """Bytes and packets of one node's link, as the kernel counted them, with Ethernet headers."""

    sent_bytes: int
    sent_packets: int
    received_bytes: int
    received_packets: int


class EmulatedNetwork:
    """The running network of an emulated cluster; a context manager that ends it.

    The network lives in a child process, the hub, and disappears with it: when it is closed, or this process ends. If
    the network is created by a thread other than the main thread, it outlives a killed process by some milliseconds.

    Example:
        >>> with EmulatedNetwork(ss.Cluster.emulated(nodes=2)) as network:  # doctest: +SKIP
        ...     network.popen(0, ["ping", "-c1", network.cluster.address(1)]).wait()
    """

    def __init__(self, cluster: EmulatedCluster) -> None:
        """Start the network of `cluster`.

        Raises:
            LaunchError: This machine cannot emulate clusters, or takes too long to set up the network. The message says
                why, and what to do instead.
        """
        self.cluster = cluster
        why = _why_not_at_all()
        if why:
            raise LaunchError(f"clusters cannot be emulated here: {why}; {PACED_INSTEAD}")
        self._hub = subprocess.Popen(
            [sys.executable, "-I", "-S", hub.__file__, "shardscope.runtime.emulated.hub"],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, process_group=0,  # not for Ctrl-C
        )  # fmt: skip
        try:
            answer = self._ask_for(network_plan(cluster))
        except BaseException:
            self.close()
            raise
        self._user: int | None = answer["user"]
        self._nodes: list[tuple[int, int]] = answer["nodes"]
        self.delays_in_kernel: bool = answer["delays"]
        """Whether the kernel adds the latency of the links; otherwise, the ranks add it to their messages."""

    def _ask_for(self, plan: dict[str, Any]) -> dict[str, Any]:
        assert self._hub.stdin is not None
        assert self._hub.stdout is not None
        plan["dies_with_parent"] = threading.current_thread() is threading.main_thread()
        with contextlib.suppress(BrokenPipeError):
            self._hub.stdin.write(json.dumps(plan) + "\n")
            self._hub.stdin.flush()
        if not wait([self._hub.stdout.fileno()], _SETUP_S):
            raise LaunchError(
                f"the emulated network was not set up within {_SETUP_S:g} s, as happens on an overloaded machine; "
                f"launch again when the machine is less busy, or {PACED_INSTEAD}"
            )
        line = self._hub.stdout.readline()
        answer: dict[str, Any] = (
            json.loads(line) if line else {"error": "the process that holds the network was killed"}
        )
        if "error" in answer:
            raise LaunchError(
                f"clusters cannot be emulated here: {answer['error']} (in a container, allow user namespaces: "
                f"for Docker --privileged, or --cap-add SYS_ADMIN,NET_ADMIN); {PACED_INSTEAD}"
            )
        return answer

    @property
    def hub_pid(self) -> int:
        """Process id of the hub."""
        return self._hub.pid

    def is_alive(self) -> bool:
        """Return whether the hub is running; without it, the links are gone."""
        return self._hub.poll() is None

    def enter(self, node: int) -> None:
        """Move this process, which must have one thread, to a node; close its descriptor of the network."""
        network, name = self._nodes[node]
        places = [network, name] if self._user is None else [self._user, network, name]
        files = [os.open(f"/proc/{self.hub_pid}/fd/{place}", os.O_RDONLY) for place in places]
        for file in files:
            hub.set_namespace(file)
            os.close(file)

    def let_go(self) -> None:
        """Close this process's end of the pipe to the hub; called in a forked child, which must not keep it alive."""
        for stream in (self._hub.stdin, self._hub.stdout):
            if stream is not None:
                os.close(stream.fileno())

    def popen(
        self, node: int, command: Sequence[str], *, env: Mapping[str, str] | None = None, **options: Any
    ) -> subprocess.Popen[Any]:
        """Start a command on a node, like `subprocess.Popen`, with gloo and NCCL set to the node's interface.

        The command is killed if this process dies; start it from the main thread.
        """

        def prepare() -> None:
            self.enter(node)
            hub.die_with_parent()

        return subprocess.Popen(
            command, env={**(os.environ if env is None else env), **on_interface()},
            preexec_fn=prepare,  # noqa: PLW1509 - namespaces can only be entered in the child
            **options,
        )  # fmt: skip

    def counters(self) -> list[LinkCounters]:
        """Return the counters of each node's link, read at the port of the switch."""
        rows = dict(
            line.split(":", 1) for line in Path(f"/proc/{self.hub_pid}/net/dev").read_text().splitlines()[2:]
        )
        counts = {name.strip(): [int(word) for word in row.split()] for name, row in rows.items()}
        ports = [counts[f"n{node}"] for node in range(len(self.cluster.nodes))]
        return [LinkCounters(port[0], port[1], port[8], port[9]) for port in ports]

    def close(self) -> None:
        """Shut down the network. Processes on its nodes keep running without a network."""
        for stream in (self._hub.stdin, self._hub.stdout):
            if stream is not None:
                with contextlib.suppress(OSError):
                    stream.close()
        try:
            self._hub.wait(_PATIENCE_S)
        except subprocess.TimeoutExpired:
            self._hub.kill()
            self._hub.wait()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def on_interface() -> dict[str, str]:
    """Return the environment variables that make gloo and NCCL use a node's link."""
    return {"GLOO_SOCKET_IFNAME": INTERFACE, "NCCL_SOCKET_IFNAME": INTERFACE}


def _why_not_at_all() -> str:
    """Return why no network can be emulated, as far as is known without trying; empty if no obstacle is known."""
    from shutil import which

    if sys.platform != "linux":
        return "network namespaces need Linux"
    missing = [tool for tool in ("ip", "tc") if which(tool) is None]
    return f"{' and '.join(missing)} missing; install iproute2" if missing else ""
