"""Speed of messages between CPU ranks of this machine, measured with real ranks over each transport.

`shardscope doctor` measures it in the process that has imported torch for its other checks; the ranks are forks of it.
In an exchange, every rank sends a message to the next rank and receives one from the previous rank. As in a ring
all-reduce, receives are posted ahead of time.
"""

from __future__ import annotations

import json
import math
import os
import signal
import socket
import time
from collections import deque
from collections.abc import Iterator
from datetime import timedelta
from statistics import median
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from shardscope.machine import usable_cores
from shardscope.runtime.record.processes import die_with_parent
from shardscope.training.transports import Name, Route, open_route

TRANSPORTS: tuple[Name, ...] = ("shm", "tcp")
_MESSAGE_BYTES = 4 << 20
_ROUNDS, _EXCHANGES, _LARGE_EXCHANGES = 5, 16, 2
"""Number of rounds, and of exchanges of small and of large messages in each round. A rank that is ahead of its peers
does not wait in some exchanges, so only the total time of many consecutive exchanges is meaningful."""
_COLLECTIVES = 8
"""Number of collectives in each round, if ranks pause before each collective."""
_AHEAD = 2
"""Number of receives posted ahead of time."""
_TIMEOUT = timedelta(seconds=10)
_MOST_S = 30
"""Time after which the system kills a rank that has not ended, in seconds."""


class TransportSpeed(NamedTuple):
    """Speed of one transport between the ranks of one group.

    Attributes:
        transport: ``"shm"`` or ``"tcp"``.
        world_size: Number of ranks that send at the same time.
        message_s: Time of an exchange of 8 bytes, in seconds.
        bandwidth: Bytes per second that each rank sends in an exchange of 4 MiB, without the time per message; NaN if
            only small messages were measured.
    """

    transport: str
    world_size: int
    message_s: float
    bandwidth: float


def world_sizes() -> list[int]:
    """Return the numbers of ranks to measure: 2, and one per core that this process may use, clamped to 4..8."""
    return [2, int(min(max(usable_cores(), 4), 8))]


def measure(world_size: int, pause_s: float | None = None) -> list[TransportSpeed]:
    """Return the speed of each transport that ranks of this machine can use. Linux only.

    Args:
        world_size: Number of ranks.
        pause_s: Time that each rank sleeps before each collective of W-1 small messages, in seconds; the sleep is not
            timed. With 0 or None, small messages are sent in long sequences. Large messages are sent only with None.

    Raises:
        RuntimeError: A rank failed; the message is the rank's error message.
    """
    listener = socket.create_server(("127.0.0.1", 0))
    port = listener.getsockname()[1]
    read, write = os.pipe()
    ranks = [_fork_rank(rank, world_size, port, write, pause_s) for rank in range(world_size)]
    os.close(write)
    server = dist.TCPStore(
        "127.0.0.1", port, is_master=True, wait_for_workers=False, timeout=_TIMEOUT,
        master_listen_fd=listener.detach(),
    )  # fmt: skip
    with open(read, encoding="utf-8") as answers:
        lines = [json.loads(line) for line in answers]  # until the last rank has ended
    for pid in ranks:
        os.waitpid(pid, 0)
    del server
    failures = [line["error"] for line in lines if "error" in line]
    if failures or not lines:
        raise RuntimeError(failures[0] if failures else "the ranks were killed")
    return [TransportSpeed(**line) for line in lines]


def _fork_rank(rank: int, world_size: int, port: int, answers: int, pause_s: float | None) -> int:
    """Return the pid of a new rank; rank 0 writes the results to `answers`, and a failing rank its error."""
    pid = os.fork()
    if pid:
        return pid
    try:
        die_with_parent()
        signal.alarm(_MOST_S)
        torch.set_num_threads(1)
        store = dist.TCPStore("127.0.0.1", port, is_master=False, timeout=_TIMEOUT)
        for speed in _speeds(store, rank, world_size, pause_s):
            if rank == 0:
                _write(answers, speed._asdict())
        os._exit(0)
    except BaseException as error:  # noqa: BLE001 - nothing above can handle it in a forked child
        _write(answers, {"error": f"{type(error).__name__}: {error}".splitlines()[0]})
    finally:
        os._exit(1)


def _write(answers: int, line: dict[str, Any]) -> None:
    os.write(answers, (json.dumps(line) + "\n").encode())


def _speeds(store: dist.Store, rank: int, world_size: int, pause_s: float | None) -> Iterator[TransportSpeed]:
    for name in TRANSPORTS:
        part = dist.PrefixStore(name, store)
        asked: Name = "auto" if name == "shm" else name
        route = open_route(
            asked, part, rank=rank, world_size=world_size, backend="gloo", timeout=_TIMEOUT, on_gpu=False
        )
        if route.name == name:
            if pause_s:
                small_s = _exchange_s(route, 8, world_size - 1, times=_COLLECTIVES, pause_s=pause_s)
            else:
                small_s = _exchange_s(route, 8, _EXCHANGES)
            bandwidth = math.nan
            if pause_s is None:
                large_s = _exchange_s(route, _MESSAGE_BYTES, _LARGE_EXCHANGES)
                bandwidth = _MESSAGE_BYTES / max(large_s - small_s, 1e-9)
            yield TransportSpeed(name, world_size, small_s, bandwidth)
        route.group.shutdown()


def _exchange_s(
    route: Route, num_bytes: int, exchanges: int, *, times: int = 1, pause_s: float = 0.0
) -> float:
    """Return the mean time of an exchange in the median round, in seconds, after an untimed warm-up round."""
    group, means = route.group, []
    following, previous = (group.rank() + 1) % group.size(), (group.rank() - 1) % group.size()
    sent = torch.zeros(num_bytes, dtype=torch.uint8)
    received = [torch.empty(num_bytes, dtype=torch.uint8) for _ in range(_AHEAD)]

    def post(i: int) -> dist.Work:
        return group.recv([received[i % _AHEAD]], previous, i)

    for _ in range(_ROUNDS + 1):
        began = time.perf_counter()
        for _ in range(times):
            if pause_s:
                time.sleep(pause_s)
            posted = deque(post(i) for i in range(min(_AHEAD, exchanges)))
            sends = []
            for i in range(exchanges):
                sends.append(group.send([sent], following, i))
                posted.popleft().wait()
                if i + _AHEAD < exchanges:
                    posted.append(post(i + _AHEAD))
            for work in sends:
                work.wait()
        means.append(((time.perf_counter() - began) / times - pause_s) / exchanges)
    return median(means[1:])
