"""Buffers that ranks share for all-gathers and reduce-scatters: the ring's bits, and errors that reach all ranks."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from conformance.ranks import RankPool
from shardscope.runtime.record.secondary_failure import is_secondary_failure
from shardscope.training.collectives import RingAllReduce
from shardscope.training.context import RankContext
from shardscope.training.transports.cuda_ipc import DeviceShardBuffers
from shardscope.training.transports.shm import ShardBuffers
from training.transports.device_files import Files

VICTIM = 1
SIZES = [1, 7, 1000, 100_000]
"""Elements of a chunk; with the last, a tensor is larger than the buffers and is exchanged in pieces."""
UNIT_BYTES = 64_000


def buffers_of(
    context: RankContext, name: str, timeout_s: float = 60.0, *, device: Path | None = None
) -> ShardBuffers:
    """The buffers of a test; with a folder, those of a GPU whose memory is in files there."""
    assert context.group is not None

    def disagreed() -> None:
        raise ValueError("the ranks disagree")

    store = dist.PrefixStore(f"test_shards/{name}", context.group.get_group_store())
    kind: Callable[..., ShardBuffers] = ShardBuffers
    if device is not None:
        kind = partial(DeviceShardBuffers, memory=Files(device, context.rank))
    return kind(
        store, context.rank, context.world_size, units=20 * [UNIT_BYTES],
        timeout_s=timeout_s, disagreed=disagreed,
    )  # fmt: skip


def values(rank: int, count: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(count, generator=torch.Generator().manual_seed(rank)).to(dtype)


def is_consequence(message: str) -> bool:
    return is_secondary_failure({"type": "DistBackendError", "message": message})


def reduced(shards: ShardBuffers, tensor: Tensor) -> Tensor:
    """This rank's chunk of the mean, by one reduce-scatter."""
    output = torch.empty(tensor.numel() // shards.world_size, dtype=tensor.dtype)
    shared = shards.to_reduce(tensor.numel(), tensor.dtype)
    if shared is None:
        shards.reduce_pieces(output, tensor, shards.world_size, digest=1)
        return output
    shared.copy_(tensor)
    shards.add(output)
    shards.meet(1, "a test")
    shards.reduce(shards.world_size)
    return output


@pytest.mark.parametrize(
    ("dtype", "on_device"),
    [(torch.float32, False), (torch.float64, False), (torch.bfloat16, False), (torch.float32, True)],
)
def test_a_mean_has_the_bits_of_the_ring(
    pool: RankPool, tmp_path: Path, dtype: torch.dtype, on_device: bool
) -> None:
    def check(context: RankContext) -> None:
        ring = RingAllReduce(context.group)
        shards = buffers_of(context, f"mean {dtype} {on_device}", device=tmp_path if on_device else None)
        for size in [*SIZES, *SIZES]:
            mine = values(context.rank, size * context.world_size, dtype)
            expected = ring.reduce_scatter_(mine.clone()) / context.world_size
            assert torch.equal(reduced(shards, mine), expected)
        shards.close()

    pool.run(check, tmp_path)


@pytest.mark.parametrize("on_device", [False, True])
def test_several_tensors_are_reduced_after_one_barrier(
    pool: RankPool, tmp_path: Path, on_device: bool
) -> None:
    def check(context: RankContext) -> int:
        ring = RingAllReduce(context.group)
        shards = buffers_of(context, f"several {on_device}", device=tmp_path if on_device else None)
        outputs, expected = [], []
        for seed in range(3):
            mine = values(context.rank + 10 * seed, 100 * context.world_size, torch.float32)
            expected.append(ring.reduce_scatter_(mine.clone()) / context.world_size)
            outputs.append(torch.empty(100))
            shared = shards.to_reduce(mine.numel(), mine.dtype)
            assert shared is not None
            shared.copy_(mine)
            shards.add(outputs[-1])
        shards.meet(1, "a test")
        shards.reduce(context.world_size)
        assert all(map(torch.equal, outputs, expected))
        shards.close()

    pool.run(check, tmp_path)


def test_a_buffer_without_room_says_so_until_it_has_been_reduced(pool: RankPool, tmp_path: Path) -> None:
    def check(context: RankContext) -> None:
        shards = buffers_of(context, "room")
        large = 200_000
        assert shards.to_reduce(large, torch.float32) is not None
        shards.add(torch.empty(large // context.world_size))
        assert not shards.fits(4 * large)
        assert shards.to_reduce(large, torch.float32) is None
        shards.meet(1, "a test")
        shards.reduce(context.world_size)
        assert shards.to_reduce(large, torch.float32) is not None
        shards.close()

    pool.run(check, tmp_path)


@pytest.mark.parametrize("on_device", [False, True])
def test_a_gathered_tensor_has_the_chunks_of_all_ranks(
    pool: RankPool, tmp_path: Path, on_device: bool
) -> None:
    def check(context: RankContext) -> None:
        shards = buffers_of(context, f"gather {on_device}", device=tmp_path if on_device else None)
        for turn, size in enumerate([*SIZES, *SIZES, *SIZES]):
            expected = torch.cat(
                [values(rank + turn, size, torch.float32) for rank in range(context.world_size)]
            )
            own = slice(context.rank * size, (context.rank + 1) * size)
            shared = shards.gathered(expected.numel(), expected.dtype)
            output = torch.full_like(expected, -1.0) if shared is None else shared
            output[own] = expected[own]
            if shared is None:
                shards.gather_pieces(output, digest=turn)
            else:
                shards.meet(turn, "a test")
            assert torch.equal(output, expected)
        shards.close()

    pool.run(check, tmp_path)


def test_different_digests_reach_all_ranks(pool: RankPool, tmp_path: Path) -> None:
    def check(context: RankContext) -> None:
        shards = buffers_of(context, "digests")
        shards.meet(2**64 - 1, "a test")
        with pytest.raises(ValueError, match="the ranks disagree"):
            shards.meet(int(context.rank == VICTIM), "a test")
        shards.close()

    pool.run(check, tmp_path)


def test_a_rank_that_leaves_ends_the_waits_of_the_others(pool: RankPool, tmp_path: Path) -> None:
    def check(context: RankContext) -> str:
        shards = buffers_of(context, "left")
        shards.meet(1, "a test")
        if context.rank == VICTIM:
            shards.close()
            return ""
        with pytest.raises(dist.DistBackendError) as error:
            shards.meet(2, "a test")
        shards.close()
        return str(error.value)

    replies = pool.run(check, tmp_path)
    others = [reply for reply in replies if reply]
    assert all("waiting for a test" in reply for reply in others), others
    assert all(map(is_consequence, others)), others


@pytest.fixture
def doomed() -> Iterator[RankPool]:
    pool = RankPool(3, timeout_s=60.0)
    yield pool
    pool.close()


@pytest.mark.slow
def test_a_rank_that_is_killed_is_named(doomed: RankPool, tmp_path: Path) -> None:
    def wait(context: RankContext) -> str:
        shards = buffers_of(context, "killed")
        shards.meet(1, "a test")
        if context.rank == VICTIM:
            os.kill(os.getpid(), signal.SIGKILL)
        with pytest.raises(dist.DistBackendError) as error:
            shards.meet(2, "a test")
        return str(error.value)

    doomed.start(wait, tmp_path)
    replies = [doomed.result(rank) for rank in range(3) if rank != VICTIM]
    assert any(f"the process of rank {VICTIM} has ended" in reply for reply in replies), replies
    assert all(map(is_consequence, replies))
