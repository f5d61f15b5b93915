"""Bytes of every collective of `torch.distributed`, in jobs and as observed on gloo, against a count of their own.

The count below knows nothing of the toolkit's: it adds up, for each rank, what the algorithm makes it send.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from conformance.ranks import RankPool
from shardscope.runtime.observe import _collectives
from shardscope.runtime.observe._collectives import CollectiveMeter
from shardscope.training.collectives.process_group import backend_traffic
from shardscope.training.context import RankContext
from shardscope.training.meter import Meter

N = 12  # elements of a tensor; divisible by 2, 3 and 4 ranks
ITEM = 4  # bytes of an element


def ones(count: int = N) -> Tensor:
    return torch.ones(count)


def uneven(rank: int, world: int) -> list[list[int]]:
    """Rows that each rank sends to each: some none, and most to itself."""
    return [[0 if (r + c) % 3 == 1 else 2 * r + c + 5 * (r == c) for c in range(world)] for r in range(world)]


def calls(rank: int, world: int) -> dict[str, tuple[str, Callable[[], Any], int]]:
    """Every collective: the name it counts under, a call, and the bytes that all ranks send together."""
    others, parts = world - 1, N // world
    rows = uneven(rank, world)
    outgoing, incoming = rows[rank], [row[rank] for row in rows]
    moved = sum(rows[r][c] for r in range(world) for c in range(world) if r != c)

    def splits() -> None:
        dist.all_to_all_single(
            torch.empty(sum(incoming), 3), torch.ones(sum(outgoing), 3), incoming, outgoing
        )

    def sparse() -> None:
        count = rank + 1
        places = torch.cat([torch.arange(count), torch.zeros(1, dtype=torch.long)])  # with a duplicate
        dist.all_reduce(torch.sparse_coo_tensor(places[None], torch.ones(count + 1, 2), (9, 2)))

    def gathered(call: Callable[..., Any], own: Any, empty: list[Any]) -> None:
        call(own, empty if rank == 0 else None, dst=0)

    def ring() -> None:
        works = [dist.isend(ones(), (rank + 1) % world), dist.irecv(ones(), (rank - 1) % world)]
        for work in works:
            work.wait()

    held = sum((each + 1) * (8 + 2 * ITEM) for each in range(world))  # int64 place and two values each
    return {
        "all_reduce": ("all_reduce", lambda: dist.all_reduce(ones()), 2 * others * N * ITEM),
        "all_reduce, asynchronous": (
            "all_reduce", lambda: dist.all_reduce(ones(), async_op=True).wait(), 2 * others * N * ITEM),
        "all_reduce_coalesced": (
            "all_reduce", lambda: dist.all_reduce_coalesced([ones(), ones(3)]), 2 * others * (N + 3) * ITEM),
        "all_reduce of nothing": ("all_reduce", lambda: dist.all_reduce(torch.empty(0)), 0),
        "all_reduce, sparse": ("all_reduce", sparse, others * held),
        "broadcast": ("broadcast", lambda: dist.broadcast(ones(), 0), others * N * ITEM),
        "reduce": ("reduce", lambda: dist.reduce(ones(), 0), others * N * ITEM),
        "all_gather": (
            "all_gather", lambda: dist.all_gather([ones() for _ in range(world)], ones()), others * world * N * ITEM),
        "all_gather_into_tensor": (
            "all_gather", lambda: dist.all_gather_into_tensor(ones(N * world), ones()), others * world * N * ITEM),
        "gather": (
            "gather", lambda: gathered(dist.gather, ones(), [ones() for _ in range(world)]), others * N * ITEM),
        "scatter": (
            "scatter", lambda: dist.scatter(ones(), [ones() for _ in range(world)] if rank == 0 else None, src=0),
            others * N * ITEM),
        "reduce_scatter": (  # gloo's is an all-reduce
            "reduce_scatter", lambda: dist.reduce_scatter(ones(parts), [ones(parts) for _ in range(world)]),
            2 * others * N * ITEM),
        "reduce_scatter_tensor": (
            "reduce_scatter", lambda: dist.reduce_scatter_tensor(ones(parts), ones()), 2 * others * N * ITEM),
        "all_to_all": (
            "all_to_all", lambda: dist.all_to_all([ones(parts) for _ in range(world)], [ones(parts)] * world),
            others * N * ITEM),
        "all_to_all_single": ("all_to_all", lambda: dist.all_to_all_single(ones(), ones()), others * N * ITEM),
        "all_to_all_single with splits": ("all_to_all", splits, moved * 3 * ITEM),
        "messages": ("send", ring, world * N * ITEM),
        "barrier": ("barrier", dist.barrier, 0),
    }  # fmt: skip


OBJECTS: dict[str, Callable[[int, int], Any]] = {
    "broadcast_object_list": lambda rank, world: dist.broadcast_object_list(
        [{"rank": 0}] * (rank < world), 0
    ),
    "all_gather_object": lambda rank, world: dist.all_gather_object([None] * world, "x" * (rank + 1)),
    "gather_object": lambda rank, world: dist.gather_object(
        "x" * rank, [None] * world if rank == 0 else None, 0
    ),
    "scatter_object_list": lambda rank, world: dist.scatter_object_list(
        [None], ["x"] * world * (rank == 0), 0
    ),
    "monitored_barrier": lambda rank, world: (rank, world) and dist.monitored_barrier(),
}
"""Collectives of objects, whose sizes pickle decides: they must be counted, and end nothing."""


@contextmanager
def observed_gloo(_: RankContext) -> Iterator[Meter]:
    """A group of gloo as a script's default group, with the observer's hooks on it."""
    default = dist.group.WORLD
    gloo = dist.new_group(backend="gloo")
    meter, problems = Meter(step=1), []

    def guarded(call: Callable[[], None]) -> None:
        try:
            call()
        except Exception as error:
            problems.append(error)

    counting = CollectiveMeter(meter, lambda *_: lambda: None, guarded)
    counting.install()
    try:
        dist.distributed_c10d._update_default_pg(gloo)
        yield meter
    finally:
        dist.distributed_c10d._update_default_pg(default)
        counting.remove()
    assert problems == []


@contextmanager
def in_a_job(context: RankContext) -> Iterator[Meter]:
    context.meter.step = 1
    context.meter.drain()
    yield context.meter
    context.meter.step = 0


Counted = Callable[[RankContext], Any]


@pytest.mark.sampled
@pytest.mark.parametrize("way", [in_a_job, observed_gloo])
def test_every_collective_counts_what_the_ranks_send(pool: RankPool, tmp_path: Path, way: Counted) -> None:
    def count(context: RankContext) -> dict[str, tuple[str, int, int, int]]:
        found = {}
        with way(context) as meter:
            for label, (name, call, expected) in calls(context.rank, context.world_size).items():
                meter.drain()
                call()
                row = meter.drain()[0][name]
                found[label] = (name, row["sent_bytes"], row["received_bytes"], expected)
        return found

    ranks = pool.run(count, tmp_path)
    for label in ranks[0]:
        expected = ranks[0][label][3]
        assert sum(each[label][1] for each in ranks) == expected, label
        assert label == "messages" or sum(each[label][2] for each in ranks) == expected, label


@pytest.mark.parametrize("way", [in_a_job, observed_gloo])
def test_an_uneven_all_to_all_counts_each_rank_by_its_own_splits(
    pool: RankPool, tmp_path: Path, way: Counted
) -> None:
    def count(context: RankContext) -> tuple[int, int]:
        rank, world = context.rank, context.world_size
        rows = uneven(rank, world)
        with way(context) as meter:
            calls(rank, world)["all_to_all_single with splits"][1]()
            traffic = meter.drain()[0]["all_to_all"]
        sent = sum(rows[rank]) - rows[rank][rank]
        received = sum(row[rank] for row in rows) - rows[rank][rank]
        return traffic["sent_bytes"] - sent * 3 * ITEM, traffic["received_bytes"] - received * 3 * ITEM

    assert set(pool.run(count, tmp_path)) == {(0, 0)}


def test_collectives_of_objects_and_of_sub_groups_end_no_recording(pool: RankPool, tmp_path: Path) -> None:
    def count(context: RankContext) -> None:
        world = context.world_size
        with observed_gloo(context) as meter:
            for call in OBJECTS.values():
                call(context.rank, world)
            pair = dist.new_group([0, world - 1], backend="gloo")
            meter.drain()
            if context.rank in (0, world - 1):
                dist.all_reduce(ones(), group=pair)
                assert meter.drain()[0]["all_reduce"]["sent_bytes"] == N * ITEM
                outputs = [ones(), ones()] if context.rank else None
                dist.gather(ones(), outputs, dst=world - 1, group=pair)
                assert meter.drain()[0]["gather"]["calls"] == 1

    pool.run(count, tmp_path)


def test_a_collective_that_cannot_be_sized_is_counted_by_name(pool: RankPool, tmp_path: Path) -> None:
    def count(context: RankContext) -> None:
        with (
            observed_gloo(context) as meter,
            patch.object(_collectives, "backend_traffic", side_effect=IndexError),
        ):
            dist.all_reduce(ones())
            assert meter.drain()[0]["all_reduce (not sized)"]["calls"] == 1

    pool.run(count, tmp_path)


def test_lists_of_different_sizes_count_all_but_the_own_one() -> None:
    """Gloo refuses them, NCCL does not."""

    class Group:
        rank, size = (lambda _: 1), (lambda _: 3)

    outputs, inputs = [ones(2), ones(700), ones(3)], [ones(5), ones(700), ones(0)]
    traffic = backend_traffic("all_to_all", 1, [outputs, inputs], Group(), "nccl")
    assert (traffic.sent_bytes, traffic.received_bytes) == (5 * ITEM, 5 * ITEM)
