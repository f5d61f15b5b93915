"""One end of a TCP connection between two emulated nodes; a program of its own that imports only the standard library.

python pair_speed.py receive ADDRESS            prints its port, then the bytes per second that arrived
python pair_speed.py send ADDRESS PORT BYTES    prints half a round trip, in seconds, then sends that many bytes
"""

from __future__ import annotations

import socket
import statistics
import sys
import time

_PINGS = 25
_CHUNK = 1 << 16
_SKIPPED = 0.25
"""Fraction of the bytes that is not timed: links with a token bucket let a burst through at first."""
_TIMEOUT_S = 20.0


def receive(address: str) -> None:
    """Answer pings, then receive until the sender closes the connection."""
    with socket.create_server((address, 0)) as server:
        server.settimeout(_TIMEOUT_S)
        print(server.getsockname()[1], flush=True)
        peer, _ = server.accept()
    with peer:
        peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        peer.settimeout(_TIMEOUT_S)
        for _ in range(_PINGS):
            peer.sendall(peer.recv(1))
        arrivals, count, view = [], 0, bytearray(_CHUNK)
        while num := peer.recv_into(view):
            count += num
            arrivals.append((time.perf_counter(), count))
    first = next(place for place, (_, so_far) in enumerate(arrivals) if so_far >= _SKIPPED * count)
    (begin, before), (end, total) = arrivals[first], arrivals[-1]
    print((total - before) / max(end - begin, 1e-9), flush=True)


def send(address: str, port: int, num_bytes: int) -> None:
    """Time pings, then send."""
    with socket.create_connection((address, port), timeout=_TIMEOUT_S) as peer:
        peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        times = []
        for _ in range(_PINGS):
            begun = time.perf_counter()
            peer.sendall(b"x")
            peer.recv(1)
            times.append(time.perf_counter() - begun)
        print(statistics.median(times) / 2, flush=True)
        peer.sendall(bytes(num_bytes))


if __name__ == "__main__":
    if sys.argv[1] == "receive":
        receive(sys.argv[2])
    else:
        send(sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))
