"""Emulated networks in tests: whether this machine can have them, and what they leave behind."""

from __future__ import annotations

import os
import re
import time
from contextlib import suppress
from functools import cache
from pathlib import Path

import pytest

from shardscope.runtime.emulated import EmulatedNetwork, why_not_emulated


@cache
def _why_not() -> str:
    return why_not_emulated()


def needs_namespaces() -> None:
    """Skip a test where clusters cannot be emulated, and say why."""
    if _why_not():
        pytest.skip(_why_not())


def namespaces_of(pid: int) -> set[str]:
    """Network namespaces that a process is in or holds open, such as ``net:[4026532008]``."""
    found = set()
    with suppress(OSError):
        places = [Path(f"/proc/{pid}/ns/net"), *Path(f"/proc/{pid}/fd").iterdir()]
        for place in places:
            with suppress(OSError):
                target = os.readlink(place)
                if re.fullmatch(r"net:\[\d+\]", target):
                    found.add(target)
    return found


def made_by(hub: int) -> set[str]:
    """Network namespaces that a hub has made."""
    return namespaces_of(hub) - namespaces_of(os.getpid())


def held_by_anyone() -> set[str]:
    """Network namespaces that any process of this machine is in or holds open."""
    pids = (int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit())
    return {namespace for pid in pids for namespace in namespaces_of(pid)}


def are_gone(namespaces: set[str], timeout: float = 60.0) -> bool:
    """Whether no process is in these namespaces or holds them open any more."""
    deadline = time.monotonic() + timeout
    while namespaces & held_by_anyone():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True


def host_traces() -> tuple[set[str], str, list[str]]:
    """What an emulated network could leave in the host: interfaces, mounts, and names of namespaces."""
    interfaces = {line.split(":")[0].strip() for line in Path("/proc/net/dev").read_text().splitlines()[2:]}
    named = Path("/run/netns")
    return (
        interfaces,
        Path("/proc/self/mountinfo").read_text(),
        sorted(os.listdir(named)) if named.is_dir() else [],
    )


__all__ = ["EmulatedNetwork", "are_gone", "held_by_anyone", "host_traces", "made_by", "needs_namespaces"]
