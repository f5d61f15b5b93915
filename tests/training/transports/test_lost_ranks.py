"""A rank that ends wakes the ranks that wait for it, with its name, and leaves nothing."""

from __future__ import annotations

import gc
import os
import signal
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from conformance.ranks import RankPool
from shardscope.runtime.record.secondary_failure import is_secondary_failure
from shardscope.training.context import RankContext

VICTIM = 1


def receive(context: RankContext) -> None:
    dist.recv(torch.empty(3), src=VICTIM)


def send_more_than_fits(context: RankContext) -> None:
    dist.send(torch.ones(5 << 20), dst=VICTIM)


def all_reduce(context: RankContext) -> None:
    dist.all_reduce(torch.ones(500_000))


def all_reduce_async(context: RankContext) -> None:
    dist.all_reduce(torch.ones(500_000), async_op=True).wait()


def future_of_all_reduce(context: RankContext) -> None:
    dist.all_reduce(torch.ones(500_000), async_op=True).get_future().wait()


def barrier(context: RankContext) -> None:
    dist.barrier()


def reduce_scatter(context: RankContext) -> None:
    dist.reduce_scatter_tensor(torch.empty(5), torch.ones(5 * context.world_size))


@pytest.mark.parametrize(
    "wait",
    [
        receive,
        send_more_than_fits,
        all_reduce,
        all_reduce_async,
        future_of_all_reduce,
        barrier,
        reduce_scatter,
    ],
)
def test_a_killed_rank_wakes_its_peers_with_its_name(
    tmp_path: Path, wait: Callable[[RankContext], None]
) -> None:
    def body(context: RankContext) -> tuple[str, str]:
        dist.barrier()
        if context.rank == VICTIM:
            (tmp_path / "pid").write_text(f"{os.getpid()}")
            signal.pause()
        try:
            wait(context)
        except RuntimeError as error:
            return type(error).__name__, str(error)
        return "", "nothing"

    def kill() -> None:
        while not (tmp_path / "pid").exists() or not (tmp_path / "pid").read_text():
            time.sleep(0.01)
        os.kill(int((tmp_path / "pid").read_text()), signal.SIGKILL)

    assert_that_the_others_name_it(body, tmp_path, kill)


def assert_that_the_others_name_it(
    body: Callable[[RankContext], tuple[str, str]], folder: Path, kill: Callable[[], None] = lambda: None
) -> None:
    """Run a function that returns the kind and the message of the error on two of three ranks."""
    pool = RankPool(3)
    try:
        pool.start(body, folder)
        kill()
        for rank in (0, 2):
            kind, message = pool.result(rank)
            assert f"Connection closed by peer: the process of rank {VICTIM} has ended" in message
            assert is_secondary_failure({"type": kind, "message": message})
    finally:
        pool.close()


@pytest.mark.slow
def test_ddp_which_waits_in_c_plus_plus_gets_the_error_too(tmp_path: Path) -> None:
    def body(context: RankContext) -> tuple[str, str]:
        model = DistributedDataParallel(nn.Linear(3, 5))
        loss = model(torch.ones(2, 3)).sum()
        dist.barrier()
        if context.rank == VICTIM:
            os.kill(os.getpid(), signal.SIGKILL)
        with pytest.raises(RuntimeError) as caught:
            loss.backward()
        return type(caught.value).__name__, str(caught.value)

    assert_that_the_others_name_it(body, tmp_path)


@pytest.mark.slow
def test_all_threads_of_a_rank_name_the_rank_that_ended(tmp_path: Path) -> None:
    def body(context: RankContext) -> list[str]:
        dist.barrier()
        if context.rank == VICTIM:
            os.kill(os.getpid(), signal.SIGKILL)

        def message_of(wait: Callable[[RankContext], None]) -> str:
            with pytest.raises(RuntimeError) as caught:
                wait(context)
            return str(caught.value)

        with ThreadPoolExecutor(3) as threads:
            return list(threads.map(message_of, [receive, send_more_than_fits, all_reduce]))

    pool = RankPool(2)
    try:
        pool.start(body, tmp_path)
        for message in pool.result(0):
            assert message.startswith(f"Connection closed by peer: the process of rank {VICTIM} has ended")
    finally:
        pool.close()


def test_what_was_sent_before_the_end_still_arrives(tmp_path: Path) -> None:
    def body(context: RankContext) -> list[float] | None:
        if context.rank == VICTIM:
            dist.send(torch.arange(3.0), dst=0)
            os.kill(os.getpid(), signal.SIGKILL)
        received = torch.empty(3)
        dist.recv(received, src=VICTIM)
        return received.tolist()

    pool = RankPool(2)
    try:
        pool.start(body, tmp_path)
        assert pool.result(0) == [0.0, 1.0, 2.0]
    finally:
        pool.close()


def test_a_rank_that_leaves_ends_the_waits_for_it(tmp_path: Path) -> None:
    def body(context: RankContext) -> str:
        group = dist.new_group([0, 1])
        if context.rank == VICTIM:
            dist.destroy_process_group(group)
            return ""
        with pytest.raises(RuntimeError) as caught:
            dist.recv(torch.empty(3), src=VICTIM, group=group)
        return str(caught.value)

    pool = RankPool(2)
    try:
        message = pool.run(body, tmp_path)[0]
    finally:
        pool.close()
    assert message.startswith(f"Connection closed by peer: rank {VICTIM} has left the group")


def test_groups_leave_no_descriptor_no_thread_and_no_memory(pool: RankPool, tmp_path: Path) -> None:
    def resources() -> tuple[int, int, int]:
        maps = sum("memfd:shardscope" in line for line in Path("/proc/self/maps").read_text().splitlines())
        files = sum("memfd:shardscope" in os.readlink(path) for path in open_files())
        return (
            maps,
            files,
            sum(thread.name in ("progress", "collectives") for thread in threading.enumerate()),
        )

    def open_files() -> list[str]:
        folder = "/proc/self/fd"
        return [path for name in os.listdir(folder) if Path(path := f"{folder}/{name}").is_symlink()]

    def body(context: RankContext) -> None:
        dist.barrier()
        gc.collect()
        before = resources()
        for _ in range(3):
            group = dist.new_group(list(range(context.world_size)))
            dist.all_reduce(torch.ones(300_000), group=group)
            dist.all_reduce(torch.ones(5), group=group, async_op=True).wait()
            following = (context.rank + 1) % context.world_size
            work = dist.irecv(torch.empty(7), (context.rank - 1) % context.world_size, group=group)
            dist.send(torch.ones(7), following, group=group)
            work.wait()
            del work
            dist.barrier(group=group)
            dist.destroy_process_group(group)
            del group
        gc.collect()
        assert resources() == before

    pool.run(body, tmp_path)


def test_nothing_has_a_name_in_dev_shm(pool: RankPool, tmp_path: Path) -> None:
    def names(context: RankContext) -> list[str]:
        dist.barrier()
        mapped = [line.split(maxsplit=5)[5:] for line in Path("/proc/self/maps").read_text().splitlines()]
        paths = [path[0].strip() for path in mapped if path]
        named = [
            path for path in paths if not path.endswith("(deleted)")
        ]  # as those of earlier emulated links
        return [path for path in named if "shardscope" in path and "/dev/shm" in path]

    assert pool.run(names, tmp_path) == [[]] * pool.world_size
