"""Memory that ranks share: found by all, or refused by all with the reason, and never left behind."""

from __future__ import annotations

import errno
import gc
import os
import socket
import tempfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path
from typing import Any, NoReturn

import pytest
import torch
import torch.distributed as dist

from conformance.ranks import RankPool
from shardscope.errors import LaunchError
from shardscope.training.context import RankContext
from shardscope.training.transports import open_route
from shardscope.training.transports.shm import files, memory
from shardscope.training.transports.shm.layout import SharedMemoryLayout
from shardscope.training.transports.shm.memory import CannotShare, SharedMemory

SIZE = 3 * memory.PAGE


def refused(*args: object, **options: object) -> NoReturn:
    raise OSError(errno.EPERM, "Operation not permitted")


def opened_by_two() -> list[SharedMemory]:
    """The memory as two ranks see it; threads stand for the ranks."""
    store = dist.HashStore()
    with ThreadPoolExecutor(2) as ranks:
        return list(ranks.map(lambda rank: SharedMemory(store, rank, 2, SIZE), range(2)))


def check_shared(first: SharedMemory, second: SharedMemory) -> None:
    """What one writes, the other reads."""
    first.words[memory.PAGE // 4] = 12345
    second.tensor(2 * memory.PAGE, 8).fill_(7)
    assert second.words[memory.PAGE // 4] == 12345
    assert first.tensor(2 * memory.PAGE, 8).tolist() == [7] * 8
    for each in (first, second):
        each.close()


OTHERS = ("shardscope-trace-", "shardscope-link-", "shardscope-conformance-")
"""What other tests have in these folders meanwhile."""


def names() -> set[str]:
    """Files of ours in the folders for shared memory and temporary files."""
    return {
        str(path)
        for folder in ("/dev/shm", tempfile.gettempdir())
        for path in Path(folder).glob("shardscope*")
        if not path.name.startswith(OTHERS) and not path.is_dir()
    }


def test_it_has_no_name() -> None:
    before = names()
    first, second = opened_by_two()
    assert os.readlink(f"/proc/self/fd/{second.file}").startswith("/memfd:")
    assert names() == before
    check_shared(first, second)


@pytest.fixture(params=["memfd", "no memfd"])
def folder(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Where the memory is: nowhere, or in `/dev/shm` if the system forbids anonymous files."""
    if request.param == "memfd":
        return "/memfd:"
    monkeypatch.setattr(os, "memfd_create", refused)
    return "/dev/shm/"


@pytest.fixture(params=["/proc", "sockets"])
def no_proc(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """The way in which ranks obtain it: through `/proc`, or over sockets if the system forbids that."""
    if request.param == "sockets":
        monkeypatch.setattr(memory, "_WAYS", (hidden(files.through_proc), files.over_sockets))


def hidden(function: Callable[..., int]) -> Callable[..., int]:
    """The function, with the same calls of the store, and with its result refused."""

    def refuse(store: dist.Store, rank: int, world_size: int, own: int | None) -> int:
        file = function(store, rank, world_size, own)
        if own is None:
            os.close(file)
        return refused()

    refuse.__name__ = function.__name__
    return refuse


def open_descriptors() -> int:
    gc.collect()  # what earlier tests left to the collector does not count
    return len(os.listdir("/proc/self/fd"))


@pytest.mark.usefixtures("no_proc")
def test_it_leaves_no_name_wherever_it_is_and_whatever_way_ranks_obtain_it(folder: str) -> None:
    before, descriptors = names(), open_descriptors()
    first, second = opened_by_two()
    for memory_of_rank in (first, second):
        place = os.readlink(f"/proc/self/fd/{memory_of_rank.file}")
        assert place.startswith(folder)
        assert folder == "/memfd:" or place.endswith("(deleted)")
        assert os.fstat(memory_of_rank.file).st_mode & 0o777 == 0o600
    assert names() == before
    check_shared(first, second)
    del first, second, memory_of_rank
    assert open_descriptors() <= descriptors


def test_a_rank_that_opens_another_file_takes_the_other_way(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process id is one of a namespace: in another container, the path may lead to another file."""

    def misled(store: dist.Store, rank: int, world_size: int, own: int | None) -> int:
        file = files.through_proc(store, rank, world_size, own)
        return file if own is not None else files.create(SIZE)

    monkeypatch.setattr(memory, "_WAYS", (misled, files.over_sockets))
    check_shared(*opened_by_two())


def failures() -> list[str]:
    """The messages of both ranks."""
    store = dist.HashStore()

    def fail(rank: int) -> str:
        with pytest.raises(CannotShare) as refusal:
            SharedMemory(store, rank, 2, SIZE)
        return str(refusal.value)

    with ThreadPoolExecutor(2) as ranks:
        return list(ranks.map(fail, range(2)))


def test_without_any_way_all_ranks_say_why(monkeypatch: pytest.MonkeyPatch) -> None:
    before = names()
    descriptors = open_descriptors()
    monkeypatch.setattr(memory, "_WAYS", (hidden(files.through_proc), hidden(files.over_sockets)))
    first, second = failures()
    assert first == second
    assert first == (
        "the ranks cannot open memory that they share (rank 0: [Errno 1] Operation not permitted)"
    )
    assert names() == before
    assert open_descriptors() <= descriptors


def test_without_space_for_a_file_all_ranks_say_so(monkeypatch: pytest.MonkeyPatch) -> None:
    assert files.why_none() == ""
    before, descriptors = names(), open_descriptors()
    monkeypatch.setattr(os, "memfd_create", refused)
    monkeypatch.setattr(os, "posix_fallocate", refused)
    first, second = failures()
    assert first == second
    assert first.startswith(
        "the ranks cannot open memory that they share (rank 0: [Errno 28] no file of 12288 bytes without a name "
        "(memfd_create: Operation not permitted; /dev/shm: Operation not permitted; "
    )
    assert "Operation not permitted" in files.why_none()
    assert names() == before
    assert open_descriptors() <= descriptors


def test_without_proc_and_sockets_a_process_knows_that_none_can_share(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    opened = os.open

    def no_proc(path: str, *flags: int) -> int:
        return refused() if path.startswith("/proc") else opened(path, *flags)

    monkeypatch.setattr(os, "open", no_proc)
    assert files.why_none() == ""
    monkeypatch.setattr(files.socket, "socketpair", refused)
    assert files.why_none() == (
        "processes cannot open memory that they share ([Errno 1] Operation not permitted)"
    )


def test_a_process_of_another_user_gets_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both ends of a socket look at whom they are connected to."""
    first, second = socket.socketpair()
    with first, second:
        files._require_same_user(first)
        user = os.geteuid()
        monkeypatch.setattr(os, "geteuid", lambda: user + 1)
        with pytest.raises(OSError, match=f"the other process belongs to user {user}"):
            files._require_same_user(second)


def on_different_hosts(context: RankContext, call: Callable[[], Any]) -> Any:
    """The result of a call during which each rank has a host of its own."""
    here, memory.this_host = memory.this_host, lambda: f"host {context.rank}"
    try:
        return call()
    finally:
        memory.this_host = here


def test_ranks_of_different_hosts_use_tcp_and_say_so(pool: RankPool, tmp_path: Path) -> None:
    def check(context: RankContext) -> tuple[str, str]:
        group = on_different_hosts(context, lambda: dist.new_group(list(range(context.world_size))))
        tensor = torch.ones(3)
        dist.all_reduce(tensor, group=group)
        assert tensor.tolist() == [context.world_size] * 3
        dist.destroy_process_group(group)
        return group.route.name, group.route.reason

    assert set(pool.run(check, tmp_path)) == {("tcp", "ranks 0 and 1 are not on the same host")}


def test_shared_memory_that_is_asked_for_and_impossible_is_an_error(pool: RankPool, tmp_path: Path) -> None:
    def check(context: RankContext) -> str:
        store = dist.PrefixStore("impossible", context.group.get_group_store())
        how = {"rank": context.rank, "world_size": context.world_size, "backend": "gloo"}
        with pytest.raises(LaunchError) as refusal:
            on_different_hosts(
                context, lambda: open_route("shm", store, **how, timeout=dist.default_pg_timeout)
            )
        return str(refusal.value)

    assert set(pool.run(check, tmp_path)) == {
        "transport='shm' cannot be used: ranks 0 and 1 are not on the same host; use transport='auto' or 'tcp'"
    }


@pytest.mark.parametrize("world_size", [2, 3, 4, 5, 8, 16, 100, 1024])
def test_nothing_in_the_memory_overlaps(world_size: int) -> None:
    layout, ranks = SharedMemoryLayout(world_size), range(min(world_size, 20))
    pairs = [(a, b) for a in ranks for b in ranks if a != b]
    words = [layout.gate, *map(layout.bell, ranks), *map(layout.alarm, ranks), *map(layout.state, ranks)]
    words += [2 * layout.arrivals_counter(rank) for rank in ranks]
    words += [2 * layout.written_counter(*pair) for pair in pairs]
    words += [2 * layout.read_counter(*pair) for pair in pairs] + [layout.wants_room(*pair) for pair in pairs]
    assert len(set(words)) == len(words)
    spans = [(layout.pipe_start(*pair), layout.pipe_bytes) for pair in pairs]
    spans += [
        (start, layout.slot_bytes)
        for parity in (0, 1)
        for start in (layout.slot_start(parity, rank) for rank in (*ranks, world_size))
    ]
    spans.sort()
    assert spans[0][0] >= 4 * max(words) + 8
    assert all(start + size <= after for (start, size), (after, _) in pairwise(spans))
    assert spans[-1][0] + spans[-1][1] <= layout.size


@pytest.mark.parametrize(("world_size", "mebibytes"), [(2, 10), (4, 34), (8, 40), (16, 40)])
def test_its_size_is_as_documented(world_size: int, mebibytes: int) -> None:
    assert SharedMemoryLayout(world_size).size <= (mebibytes + 0.05) * 2**20
