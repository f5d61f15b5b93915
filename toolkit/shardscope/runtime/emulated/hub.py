"""The process that holds the namespaces of an emulated network. Uses the standard library only, and starts in 30 ms.

It reads a plan, one line of JSON, from its standard input, sets up the network, answers with one line of JSON, and
waits until its standard input is closed. Each namespace is held by a file descriptor of this process, and other
processes enter it through ``/proc/PID/fd``. The hub itself is in the namespace of the switches.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import socket
import subprocess
import sys
from contextlib import suppress
from typing import Any, NoReturn

NEW_UTS, NEW_USER, NEW_NET = 0x04000000, 0x10000000, 0x40000000
_PR_SET_PDEATHSIG = 1
_COMMAND_S = 10.0
"""Time limit of one call of `ip` or `tc`, in seconds; a call usually takes some milliseconds."""


def _checked(result: int, what: str) -> None:
    if result:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")


def unshare(flags: int) -> None:
    """Move this process to new namespaces."""
    _checked(ctypes.CDLL(None, use_errno=True).unshare(flags), "unshare")


def set_namespace(file: int) -> None:
    """Move this process to the namespace of a file descriptor."""
    _checked(ctypes.CDLL(None, use_errno=True).setns(file, 0), "setns")


def die_with_parent() -> None:
    """Make the system kill this process when the thread that started it has ended."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


def unshare_network() -> bool:
    """Move to new network and host name namespaces; return whether this required a new user namespace as well."""
    user, group = os.geteuid(), os.getegid()
    try:
        unshare(NEW_NET | NEW_UTS)
    except PermissionError:
        _unshare_user(user, group)
        return True
    return False


def _unshare_user(user: int, group: int) -> None:
    """Move to new namespaces as an ordinary user, who becomes root in a new user namespace."""
    try:
        unshare(NEW_USER | NEW_NET | NEW_UTS)
        for name, text in (("setgroups", "deny"), ("uid_map", f"0 {user} 1"), ("gid_map", f"0 {group} 1")):
            with open(f"/proc/self/{name}", "w") as file:
                file.write(text)
    except OSError as error:
        raise OSError(error.errno, f"the system forbids network namespaces ({error.strerror})") from None


def held(kind: str) -> int:
    """Open a namespace of this process, of a kind such as ``net``; return its file descriptor."""
    return os.open(f"/proc/self/ns/{kind}", os.O_RDONLY)


def run(command: list[str], **options: Any) -> subprocess.CompletedProcess[str]:
    """Run a command and return how it ended.

    Raises:
        OSError: The command does not exist, or has not ended in time.
    """
    try:
        return subprocess.run(
            command, capture_output=True, text=True, timeout=_COMMAND_S, check=False, **options
        )
    except subprocess.TimeoutExpired:
        raise OSError(0, f"{' '.join(command)} did not end within {_COMMAND_S:g} s") from None


def run_batch(tool: str, lines: list[str], namespace: int | None = None) -> None:
    """Run commands of `ip` or `tc` in one process, inside a namespace."""
    if not lines:
        return
    enter = None if namespace is None else lambda: set_namespace(namespace)
    text = "\n".join(lines).replace("HUB", str(os.getpid()))
    done = run([tool, "-batch", "-"], input=text + "\n", preexec_fn=enter)
    if done.returncode:
        raise OSError(0, f"{tool}: {' '.join(done.stderr.split())}")


def has_netem() -> bool:
    """Return whether the kernel can delay packets."""
    probe = ["tc", "qdisc", "add", "dev", "lo", "root", "netem", "delay", "1ms"]
    return run(probe).returncode == 0


def add_node(plan: dict[str, Any], switches: int, host_name: int) -> tuple[int, int]:
    """Create a node's namespaces and its end of the link. Return the descriptors of its network and host name."""
    unshare(NEW_NET | NEW_UTS)
    socket.sethostname(plan["host"])
    for path, value in plan["settings"].items():
        with suppress(OSError), open(path, "w") as file:  # in some containers, settings are read-only
            file.write(value)
    network, name = held("net"), held("uts")
    set_namespace(switches)
    set_namespace(host_name)
    run_batch("ip", plan["ip"], network)
    with suppress(OSError):  # only makes rates steadier; an old `ip` does not know it
        run_batch("ip", plan["segments"], network)
    run_batch("tc", plan["tc"], network)
    return network, name


def set_up(plan: dict[str, Any]) -> dict[str, Any]:
    """Set up the network of a plan (see `commands.network_plan`), and return the locations of its namespaces."""
    with_user = unshare_network()
    if plan["dies_with_parent"]:
        die_with_parent()  # again: the system forgets it when a process changes its user namespace
    user, switches, name = held("user"), held("net"), held("uts")
    delays = plan["delays"] and has_netem()
    run_batch("ip", plan["switches"])
    nodes = [add_node(node, switches, name) for node in plan["nodes"]]
    run_batch("ip", plan["ports"])
    run_batch("tc", plan["delayed"] if delays else plan["limited"])
    return {"user": user if with_user else None, "nodes": nodes, "delays": delays}


def main() -> NoReturn:
    """Set up the network, report the result, and keep the network until the standard input is closed."""
    line = sys.stdin.readline()
    if not line:  # whoever started this process has died
        os._exit(1)
    plan = json.loads(line)
    if plan["dies_with_parent"]:
        die_with_parent()
    try:
        answer = set_up(plan)
    except OSError as error:
        answer = {"error": error.strerror or str(error)}
    with suppress(BrokenPipeError):
        print(json.dumps(answer), flush=True)
    sys.stdin.read()
    os._exit(0)


if __name__ == "__main__":
    main()
