"""Emulated networks: real TCP on links with counters, without root, and nothing is left of them whatever dies."""

from __future__ import annotations

import os
import random
import shutil
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest

import shardscope as ss
from conformance.emulated import EmulatedNetwork, are_gone, host_traces, made_by, needs_namespaces
from conformance.runs import all_gone
from shardscope.runtime.emulated import hub, network

LISTEN = """
import socket
server = socket.socket()
server.bind(("10.77.0.100", 5555))
server.listen()
print("ready", flush=True)
peer, (address, _) = server.accept()
count = 0
while data := peer.recv(1 << 20):
    count += len(data)
print(socket.gethostname(), address, count)
"""
SEND = """
import socket
peer = socket.create_connection(("10.77.0.100", 5555))
peer.sendall(bytes(2_000_000))
"""
OWNER = """
import sys
import shardscope as ss
from shardscope.runtime.emulated import EmulatedNetwork
print("starting", flush=True)
nodes = int(sys.argv[1])
with EmulatedNetwork(ss.Cluster.emulated(nodes=2 * nodes, racks=2, rack_bandwidth="1 Gbit/s")) as network:
    process = network.popen(0, ["sleep", "600"])
    print(network.hub_pid, process.pid, flush=True)
    sys.stdin.read()
    process.kill()
    process.wait()
"""


def exchange(cluster_network: EmulatedNetwork) -> str:
    """Node 1 sends two megabytes to node 0; what node 0 says of them."""
    options = {"stdout": subprocess.PIPE, "text": True}
    listener = cluster_network.popen(0, [sys.executable, "-c", LISTEN], **options)
    assert listener.stdout.readline() == "ready\n"
    assert cluster_network.popen(1, [sys.executable, "-c", SEND]).wait(60) == 0
    said: str = listener.communicate(timeout=60)[0]
    return said


@pytest.mark.parametrize("racks", [1, 2])
def test_nodes_talk_over_their_own_links(racks: int) -> None:
    needs_namespaces()
    rate = None if racks == 1 else "200 Mbit/s"
    cluster = ss.Cluster.emulated(nodes=4, bandwidth="400 Mbit/s", racks=racks, rack_bandwidth=rate)
    with EmulatedNetwork(cluster) as links:
        assert exchange(links) == "10.77.0.100 10.77.0.101 2000000\n"
        receiver, sender, *others = links.counters()
    headers = 66 * -(-2_000_000 // 1448)  # the kernel counts those of several segments sent at once only once
    assert 2_000_000 < sender.sent_bytes <= 1.02 * (2_000_000 + headers)
    assert 2_000_000 < receiver.received_bytes <= 1.02 * (2_000_000 + headers)
    assert all(other.sent_bytes == 0 for other in others)


@pytest.mark.skipif(shutil.which("setpriv") is None, reason="needs setpriv (util-linux)")
@pytest.mark.parametrize("capabilities", ["-all,+setfcap", "-all"])
def test_it_needs_no_root(capabilities: str) -> None:
    """Without the capability to set up networks; the second time also without what a root user needs to map itself."""
    needs_namespaces()
    script = (
        "import shardscope as ss; from shardscope.runtime.emulated import EmulatedNetwork\n"
        "with EmulatedNetwork(ss.Cluster.emulated(nodes=2)) as links: print(len(links.counters()))"
    )
    drop = ["setpriv", f"--bounding-set={capabilities}", "--inh-caps=-all"] if os.geteuid() == 0 else []
    done = subprocess.run(
        [*drop, sys.executable, "-c", script], capture_output=True, text=True, timeout=120, check=False
    )
    if drop and capabilities == "-all":
        assert "clusters cannot be emulated here: the system forbids network namespaces" in done.stderr
        assert "ss.Job(link=ss.Link(" in done.stderr
    else:
        assert done.stdout == "2\n", done.stderr


def test_where_tools_are_missing_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.setattr(sys, "platform", "linux")
    with pytest.raises(ss.errors.LaunchError, match="ip and tc missing; install iproute2"):
        EmulatedNetwork(ss.Cluster.emulated(nodes=2))


def test_a_network_that_is_not_set_up_in_time_is_given_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "hub.py").write_text("import sys; sys.stdin.read()")
    monkeypatch.setattr(hub, "__file__", str(tmp_path / "hub.py"))
    monkeypatch.setattr(network, "_why_not_at_all", str)
    monkeypatch.setattr(network, "_SETUP_S", 0.1)
    with pytest.raises(ss.errors.LaunchError, match="was not set up within 0.1 s, .* launch again when"):
        EmulatedNetwork(ss.Cluster.emulated(nodes=2))


def test_a_command_that_does_not_end_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hub, "_COMMAND_S", 0.1)
    with pytest.raises(OSError, match="sleep 600 did not end within 0.1 s"):
        hub.run(["sleep", "600"])


def test_on_other_systems_it_says_what_to_do_instead(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(network.sys, "platform", "darwin")
    with pytest.raises(
        ss.errors.LaunchError, match="network namespaces need Linux; emulate slower links without it"
    ):
        EmulatedNetwork(ss.Cluster.emulated(nodes=2))


def test_a_command_that_fails_ends_the_network(monkeypatch: pytest.MonkeyPatch) -> None:
    needs_namespaces()
    hubs: list[int] = []
    popen = subprocess.Popen
    monkeypatch.setattr(
        network.subprocess, "Popen", lambda *a, **o: hubs.append((p := popen(*a, **o)).pid) or p
    )
    monkeypatch.setattr(network, "network_plan", _with_a_wrong_command)
    with pytest.raises(ss.errors.LaunchError, match="cannot be emulated here: ip: "):
        EmulatedNetwork(ss.Cluster.emulated(nodes=2))
    assert all_gone(hubs)


def _with_a_wrong_command(cluster: object) -> dict[str, object]:
    assert isinstance(cluster, ss.Cluster.emulated(nodes=1).__class__)
    return {**_plan(cluster), "ports": ["link set nothing up"]}


_plan = network.network_plan


@pytest.mark.sampled
@pytest.mark.parametrize("seed", range(100))
def test_nothing_is_left_whatever_dies_and_when(seed: int) -> None:
    """The owner or the hub is killed at a random moment, from before the set-up to after it, or the owner closes it."""
    needs_namespaces()
    draw, before = random.Random(seed), host_traces()
    owner = subprocess.Popen(
        [sys.executable, "-c", OWNER, str(draw.randint(1, 3))], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert owner.stdin is not None
    assert owner.stdout is not None
    try:
        assert owner.stdout.readline() == b"starting\n"
        time.sleep(draw.uniform(0.0, 0.3))  # a moment to be killed at; nothing is judged by it
        children = _children(owner.pid)
        namespaces = {name for child in children for name in made_by(child)}
        how = draw.choice(["kill owner", "terminate owner", "kill hub", "close"])
        if how == "kill hub" and children:
            with suppress(ProcessLookupError):
                os.kill(children[0], signal.SIGKILL)
        if how.endswith("owner"):
            owner.send_signal(signal.SIGKILL if how == "kill owner" else signal.SIGTERM)
        owner.stdin.close()
        owner.wait(60)
    finally:
        owner.kill()
        owner.wait()
        owner.stdout.close()
    assert all_gone(children)
    assert are_gone(namespaces)
    assert host_traces() == before


def _children(pid: int) -> list[int]:
    with suppress(OSError):
        return [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    return []


def test_the_hub_file_runs_alone() -> None:
    """It starts in a bare interpreter, so it may import the standard library only."""
    text = Path(hub.__file__).read_text()
    assert "shardscope" not in text.replace("shardscope.runtime.emulated", "")
