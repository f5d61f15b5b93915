"""Memory that ranks share: found by all, or refused by all with the reason, and never left behind."""

from __future__ import annotations

import errno
import os
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
from shardscope.training.transports.shm import memory, why_no_memory
from shardscope.training.transports.shm.layout import Layout
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


def names() -> set[str]:
    """Files of ours in the folders for shared memory and temporary files."""
    return {
        str(path)
        for folder in ("/dev/shm", tempfile.gettempdir())
        for path in Path(folder).glob("shardscope-*")
    }


def test_it_has_no_name() -> None:
    before = names()
    first, second = opened_by_two()
    assert os.readlink(f"/proc/self/fd/{second.file}").startswith("/memfd:")
    assert names() == before
    check_shared(first, second)


def test_without_memfd_it_is_a_file_that_is_deleted_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    before = names()
    monkeypatch.setattr(os, "memfd_create", refused)
    first, second = opened_by_two()
    assert os.readlink(f"/proc/self/fd/{second.file}").endswith("(deleted)")
    assert names() == before
    check_shared(first, second)


def test_if_a_rank_cannot_open_it_all_use_a_file(monkeypatch: pytest.MonkeyPatch) -> None:
    create = memory._anonymous

    def hidden(size: int) -> memory._Created:
        made = create(size)
        return memory._Created(made.file, "/proc/no-such-process/fd/3", made.forget)

    hidden.__name__ = "_anonymous"
    monkeypatch.setattr(memory, "_anonymous", hidden)
    first, second = opened_by_two()
    assert os.readlink(f"/proc/self/fd/{first.file}").endswith("(deleted)")
    check_shared(first, second)


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
    assert why_no_memory() == ""
    before = names()
    monkeypatch.setattr(os, "memfd_create", refused)
    monkeypatch.setattr(os, "posix_fallocate", refused)
    first, second = failures()
    assert first == second
    assert first.startswith(
        "the ranks cannot open memory that they share (rank 0: [Errno 28] no space for 12288 bytes"
    )
    assert "Operation not permitted" in why_no_memory()
    assert names() == before


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
    layout, ranks = Layout(world_size), range(min(world_size, 20))
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
        for start in (*(layout.slot_start(parity, rank) for rank in ranks), layout.result_start(parity))
    ]
    spans.sort()
    assert spans[0][0] >= 4 * max(words) + 8
    assert all(start + size <= after for (start, size), (after, _) in pairwise(spans))
    assert spans[-1][0] + spans[-1][1] <= layout.size


@pytest.mark.parametrize(("world_size", "mebibytes"), [(2, 10), (4, 34), (8, 40), (16, 40)])
def test_its_size_is_as_documented(world_size: int, mebibytes: int) -> None:
    assert Layout(world_size).size <= (mebibytes + 0.05) * 2**20
