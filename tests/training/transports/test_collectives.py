"""Collectives over shared memory: sums in the documented order, equal bits on all ranks, and what gloo would give."""

from __future__ import annotations

from collections.abc import Callable
from functools import reduce
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from conformance.ranks import RankPool
from shardscope.training.context import RankContext
from shardscope.training.transports.shm.collectives import RamSlots
from shardscope.training.transports.shm.layout import SharedMemoryLayout

SLOT = SharedMemoryLayout(4).slot_bytes
SIZES = [
    0,
    1,
    2,
    3,
    7,
    1001,
    RamSlots.small_bytes // 4,
    RamSlots.small_bytes // 4 + 1,
    SLOT // 4,
    SLOT // 4 + 1,
    3 * SLOT // 4 - 5,
]
DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.int32, torch.uint8]


def values(rank: int, count: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Numbers of very different size, so that the order of additions shows in the last bits."""
    generator = torch.Generator().manual_seed(100 * count + rank)
    if dtype.is_floating_point:
        return (torch.randn(count, generator=generator) * torch.randn(count, generator=generator).exp()).to(
            dtype
        )
    return torch.randint(0, 50, (count,), generator=generator).to(dtype)


def total(world_size: int, count: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """The sum in the order of the ranks."""
    return reduce(torch.add, [values(rank, count, dtype) for rank in range(world_size)])


def test_the_pool_uses_shared_memory(pool: RankPool, tmp_path: Path) -> None:
    assert set(pool.run(lambda context: context.transport, tmp_path)) == {"shm"}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_all_reduce_adds_in_the_order_of_the_ranks(
    pool: RankPool, tmp_path: Path, dtype: torch.dtype
) -> None:
    def check(context: RankContext) -> None:
        for count in SIZES:
            tensor = values(context.rank, count, dtype)
            dist.all_reduce(tensor)
            assert torch.equal(tensor, total(context.world_size, count, dtype)), count

    pool.run(check, tmp_path)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_reduce_scatter_gives_each_rank_its_chunk_of_the_sum(
    pool: RankPool, tmp_path: Path, dtype: torch.dtype
) -> None:
    def check(context: RankContext) -> None:
        for count in SIZES:
            whole, output = (
                values(context.rank, count * context.world_size, dtype),
                torch.empty(count, dtype=dtype),
            )
            dist.reduce_scatter_tensor(output, whole)
            expected = total(context.world_size, count * context.world_size, dtype)
            assert torch.equal(output, expected.view(context.world_size, count)[context.rank]), count
            chunks = list(whole.chunk(context.world_size)) if count else [whole] * context.world_size
            listed = torch.empty_like(output)
            dist.reduce_scatter(listed, chunks)
            assert torch.equal(listed, output), count

    pool.run(check, tmp_path)


@pytest.mark.parametrize("dtype", [*DTYPES, torch.bool, torch.complex64], ids=str)
def test_all_gather_and_broadcast_copy(pool: RankPool, tmp_path: Path, dtype: torch.dtype) -> None:
    def check(context: RankContext) -> None:
        ranks = range(context.world_size)
        for count in SIZES:
            own = values(context.rank, count).to(dtype)
            expected = [values(rank, count).to(dtype) for rank in ranks]
            output = torch.empty(count * context.world_size, dtype=dtype)
            dist.all_gather_into_tensor(output, own)
            assert torch.equal(output, torch.cat(expected)), count
            rows = [torch.empty_like(own) for _ in ranks]
            dist.all_gather(rows, own)
            assert all(map(torch.equal, rows, expected)), count
            for root in ranks:
                tensor = own.clone()
                dist.broadcast(tensor, src=root)
                assert torch.equal(tensor, expected[root]), (count, root)

    pool.run(check, tmp_path)


@pytest.mark.parametrize(
    ("operation", "reduction"),
    [("MIN", torch.minimum), ("MAX", torch.maximum), ("PRODUCT", torch.mul), ("BOR", torch.bitwise_or)],
)
def test_other_reductions(
    pool: RankPool, tmp_path: Path, operation: str, reduction: Callable[[Tensor, Tensor], Tensor]
) -> None:
    """BOR has no implementation in shared memory, and goes through gloo."""

    def check(context: RankContext) -> None:
        for count in (1, 1001, SLOT // 4 + 1):
            tensor = values(context.rank, count, torch.int64)
            every = [values(rank, count, torch.int64) for rank in range(context.world_size)]
            dist.all_reduce(tensor, getattr(dist.ReduceOp, operation))
            assert torch.equal(tensor, reduce(reduction, every)), count

    pool.run(check, tmp_path)


def test_tensors_that_are_not_contiguous(pool: RankPool, tmp_path: Path) -> None:
    def check(context: RankContext) -> None:
        tensor = values(context.rank, 35).view(5, 7).t()
        dist.all_reduce(tensor)
        assert torch.equal(tensor, total(context.world_size, 35).view(5, 7).t())
        leaf = torch.nn.Parameter(values(context.rank, 8))
        dist.broadcast(leaf, src=0)
        assert torch.equal(leaf, values(0, 8))
        rows = [torch.empty(7, 5).t() for _ in range(context.world_size)]
        dist.all_gather(rows, values(context.rank, 35).view(5, 7))
        assert all(torch.equal(row, values(rank, 35).view(5, 7)) for rank, row in enumerate(rows))

    pool.run(check, tmp_path)


def test_asynchronous_collectives_run_in_their_order_and_resolve_futures(
    pool: RankPool, tmp_path: Path
) -> None:
    def check(context: RankContext) -> None:
        world_size = context.world_size
        tensors = [values(context.rank, count) for count in (5, 70_001, 3, 400_003)]
        works = [dist.all_reduce(tensor, async_op=True) for tensor in tensors]
        futures = [work.get_future() for work in works]
        now = values(context.rank, 9)
        dist.all_reduce(now)
        assert torch.equal(now, total(world_size, 9))
        for tensor, work, future in zip(tensors, works, futures, strict=True):
            (result,) = future.wait()
            work.wait()
            assert work.is_completed()
            assert torch.equal(tensor, total(world_size, tensor.numel()))
            assert torch.equal(result, tensor)

    pool.run(check, tmp_path)


def test_a_callback_may_call_a_collective_and_wait_for_it(pool: RankPool, tmp_path: Path) -> None:
    def check(context: RankContext) -> None:
        first, second = (values(context.rank, count) for count in (400_003, 5))

        def then(future: torch.futures.Future[list[Tensor]]) -> Tensor:
            future.wait()
            (result,) = dist.all_reduce(second, async_op=True).get_future().wait()
            return result

        chained = dist.all_reduce(first, async_op=True).get_future().then(then)
        assert torch.equal(chained.wait(), total(context.world_size, 5))
        assert torch.equal(first, total(context.world_size, 400_003))

    pool.run(check, tmp_path)


def test_a_rank_may_send_while_its_asynchronous_collective_waits_for_the_receiver(
    pool: RankPool, tmp_path: Path
) -> None:
    def check(context: RankContext) -> None:
        tensor, last = values(context.rank, 1001), context.world_size - 1
        if context.rank == last:
            dist.recv(torch.empty(8), src=0)
        work = dist.all_reduce(tensor, async_op=True)
        if context.rank == 0:
            dist.send(torch.ones(8), dst=last)
        work.wait()
        assert torch.equal(tensor, total(context.world_size, 1001))

    pool.run(check, tmp_path)


def test_rare_collectives_go_through_gloo(pool: RankPool, tmp_path: Path) -> None:
    def check(context: RankContext) -> None:
        rank, world_size = context.rank, context.world_size
        rows = [torch.empty(3) for _ in range(world_size)] if rank == 0 else None
        dist.gather(torch.full((3,), float(rank)), rows, dst=0)
        assert rows is None or [row[0].item() for row in rows] == list(range(world_size))
        out = torch.empty(world_size)
        dist.all_to_all_single(out, torch.full((world_size,), float(rank)))
        assert out.tolist() == list(range(world_size))
        parts = [torch.full((2,), float(peer)) for peer in range(world_size)] if rank == 0 else None
        part = torch.empty(2)
        dist.scatter(part, parts, src=0)
        assert part.tolist() == [rank, rank]
        objects: list[object] = [None] * world_size
        dist.all_gather_object(objects, {"rank": rank})
        assert objects == [{"rank": peer} for peer in range(world_size)]
        dist.barrier()

    pool.run(check, tmp_path)


def test_groups_have_memory_of_their_own(pool: RankPool, tmp_path: Path) -> None:
    def check(context: RankContext) -> None:
        members = list(range(1, context.world_size))
        others = dist.new_group(members)
        pair = dist.new_group([0, context.world_size - 1])
        for count in (5, 300_000):
            if context.rank in members:
                tensor = values(context.rank, count)
                dist.all_reduce(tensor, group=others)
                assert torch.equal(tensor, reduce(torch.add, [values(rank, count) for rank in members]))
            everyone = values(context.rank, count)
            dist.all_reduce(everyone)
            assert torch.equal(everyone, total(context.world_size, count))
            if context.rank == 0:
                dist.send(everyone, dst=context.world_size - 1, group=pair)
            elif context.rank == context.world_size - 1:
                received = torch.empty_like(everyone)
                dist.recv(received, src=0, group=pair)
                assert torch.equal(received, everyone)
        for group in (others, pair):
            if group is not dist.GroupMember.NON_GROUP_MEMBER:
                dist.destroy_process_group(group)

    pool.run(check, tmp_path)
