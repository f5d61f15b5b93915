"""A port for a server that is told its port before it starts."""

from __future__ import annotations

import random
import socket
from pathlib import Path

_EPHEMERAL = Path("/proc/sys/net/ipv4/ip_local_port_range")


def free_port() -> int:
    """A port of the loopback that nobody listens on, and that the system gives to nobody who asks for any port.

    Between the choice and the server's start other tests open connections; each of them takes a port that the system
    picks, and could take this one.
    """
    picked_by_system = int(_EPHEMERAL.read_text().split()[0]) if _EPHEMERAL.exists() else 32768
    for port in random.SystemRandom().sample(range(20_000, max(picked_by_system, 20_200)), 100):
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
    raise AssertionError("no port is free")
