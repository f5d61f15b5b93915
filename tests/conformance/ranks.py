"""Real ranks for tests: a pool of processes that stays up and runs functions on all of them at once.

    pool = RankPool(4)
    pool.run(lambda rank: ...)        one result a rank

The ranks are joined by a metered group, over shared memory where the machine has it, with its store on a port that the
system picks. A function that takes too long, or raises, ends the pool: no test hangs, and no process is left.
"""

from __future__ import annotations

import multiprocessing
import os
import socket
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import cloudpickle
import pytest
import torch
import torch.distributed as dist

from shardscope.runlog.writer import EventWriter
from shardscope.training.collectives import process_group
from shardscope.training.context import SHARED_GPU, RankContext
from shardscope.training.meter import OBSERVING, Meter

TIMEOUT_S = 120.0
WORLD_SIZES = (2, 3, 4)
OVER = "over {}"
"""Name of a transport in the name of a test."""


def _serve(
    rank: int, world_size: int, port: int, timeout_s: float, transport: Any, kind: str, requests: Connection
) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    device, backend = torch.device("cpu"), "gloo"
    if kind == "cuda":
        num_gpus = torch.cuda.device_count()
        device, backend = torch.device(kind, rank % num_gpus), "nccl" if world_size <= num_gpus else "gloo"
        torch.cuda.set_device(device)
    label = SHARED_GPU if kind == "cuda" and backend == "gloo" else backend
    store = dist.TCPStore("127.0.0.1", port, is_master=False, timeout=timedelta(seconds=90))
    meter = Meter()
    group = process_group.init(
        meter, backend=backend, rank=rank, world_size=world_size, timeout=timedelta(seconds=timeout_s),
        store=store, transport=transport, on_gpu=kind == "cuda",
    )  # fmt: skip
    while True:
        try:
            message = requests.recv_bytes()
        except EOFError:
            os._exit(0)
        function, folder = cloudpickle.loads(message)
        events = EventWriter(Path(folder) / f"rank-{rank}.jsonl", rank)
        context = RankContext(rank, world_size, device, meter, events, group, label)
        meter.step = OBSERVING
        meter.drain(), meter.drain_late()  # what the group has sent in earlier tests
        try:
            reply = (True, function(context))
        except BaseException:
            reply = (False, traceback.format_exc())
        events.close()
        requests.send_bytes(cloudpickle.dumps(reply))


@dataclass
class RankPool:
    """`world_size` processes in one group; a message that waits for `timeout_s` raises."""

    world_size: int
    timeout_s: float = 90.0
    transport: str = "auto"
    device: str = "cpu"

    def __post_init__(self) -> None:
        processes = multiprocessing.get_context("forkserver")
        processes.set_forkserver_preload(["torch", "torch._dynamo", "shardscope.training.trainer"])
        listener = socket.socket()
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
        self._store = dist.TCPStore(
            "127.0.0.1", port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach()
        )
        self._pipes: list[Connection] = []
        self._processes = []
        for rank in range(self.world_size):
            ours, theirs = processes.Pipe()
            process = processes.Process(
                target=_serve,
                args=(rank, self.world_size, port, self.timeout_s, self.transport, self.device, theirs),
                daemon=True,
            )
            process.start()
            theirs.close()
            self._pipes.append(ours)
            self._processes.append(process)

    def run(self, function: Callable[[RankContext], Any], folder: Path) -> list[Any]:
        """The results of `function` on every rank, by rank. Events go to `folder`."""
        self.start(function, folder)
        replies = [self._reply(rank) for rank in range(self.world_size)]
        failed = [text for done, text in replies if not done]
        if failed:
            self.close()
            raise AssertionError("a rank failed:\n" + failed[0])
        return [result for _, result in replies]

    def start(self, function: Callable[[RankContext], Any], folder: Path) -> None:
        """Call `function` on every rank, without waiting for it."""
        message = cloudpickle.dumps((function, str(folder)))
        for pipe in self._pipes:
            pipe.send_bytes(message)

    def result(self, rank: int) -> Any:
        """The result of the started function on a rank, if others may have died."""
        done, result = self._reply(rank)
        assert done, result
        return result

    def _reply(self, rank: int) -> tuple[bool, Any]:
        if not self._pipes[rank].poll(TIMEOUT_S):
            self.close()
            raise AssertionError(f"rank {rank} did not answer within {TIMEOUT_S:g} s")
        return cloudpickle.loads(self._pipes[rank].recv_bytes())

    @property
    def closed(self) -> bool:
        return not self._processes

    def close(self) -> None:
        """End all processes."""
        for process in self._processes:
            process.kill()
            process.join(10)
        self._processes, self._pipes = [], []


class RankPools:
    """The pools of one world size, by transport; a pool that a failing test has ended is made anew."""

    def __init__(self, world_size: int) -> None:
        self._world_size = world_size
        self._pools: dict[str, RankPool] = {}

    def over(self, transport: str) -> RankPool:
        """The pool whose ranks communicate over a transport."""
        if transport not in self._pools or self._pools[transport].closed:
            self._pools[transport] = RankPool(self._world_size, transport=transport)
        return self._pools[transport]

    def close(self) -> None:
        """End all processes."""
        for pool in self._pools.values():
            pool.close()


def over_both(metafunc: pytest.Metafunc) -> None:
    """Run a test over the transport that a job gets by default and over TCP; `thinning` leaves out most of it."""
    if "pool" in metafunc.fixturenames:
        metafunc.parametrize("transport", ["auto", "tcp"], ids=OVER.format, indirect=True)
