"""Messages between devices: the protocol on files that stand in for GPU memory, and the transport itself on GPUs."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import shardscope as ss
from conformance.ranks import RankPool
from conformance.runs import small_job
from shardscope.training.context import RankContext
from shardscope.training.transports.cuda_ipc import Arena, DeviceMailbox
from shardscope.training.transports.shm.messages import ANY

SEGMENT = 4096
SIZES = [0, 1, 511, 512, 513, SEGMENT, SEGMENT + 1, 10 * SEGMENT + 7]


class Files:
    """Memory in files of one folder, which every process can map."""

    def __init__(self, folder: Path, rank: int) -> None:
        self._folder, self._rank, self.num_allocated = folder, rank, 0

    def allocate(self, num_bytes: int) -> Tensor:
        self.num_allocated += 1
        self._last = self._folder / f"{self._rank}-{self.num_allocated}"
        return self.open(f"{num_bytes} {self._last}")

    def export(self, segment: Tensor) -> str:
        return f"{segment.numel()} {self._last}"  # the newest segment, which is the one that is new to a rank

    def open(self, exported: str) -> Tensor:
        size, path = exported.split(maxsplit=1)
        return torch.from_file(path, shared=True, size=int(size), dtype=torch.uint8)

    def synchronize(self) -> None:
        pass


def mailbox(context: RankContext, folder: Path) -> DeviceMailbox:
    group = context.group
    store = dist.PrefixStore(str(folder), group.get_group_store())
    memory = Files(folder, context.rank)
    return DeviceMailbox(group.inner._mailbox, memory, store, context.rank, segment_bytes=SEGMENT)


def content(source: int, tag: int) -> Tensor:
    generator = torch.Generator().manual_seed(1000 * source + tag)
    return torch.randint(0, 256, (SIZES[tag % len(SIZES)],), generator=generator, dtype=torch.uint8)


def test_an_arena_reuses_what_was_given_back() -> None:
    class Plain:
        def allocate(self, num_bytes: int) -> Tensor:
            return torch.empty(num_bytes, dtype=torch.uint8)

    arena, source = Arena(Plain(), segment_bytes=SEGMENT), random.Random(3)
    taken: list[tuple[int, int, int]] = []
    for _ in range(2000):
        if taken and source.random() < 0.5:
            arena.give_back(taken.pop(source.randrange(len(taken))))
        elif len(taken) < 6:
            size = source.randrange(1500)
            segment, start, room = arena.take(size)
            assert room >= size
            assert start + room <= arena.segments[segment].numel()
            for other, begin, length in taken:
                assert other != segment or begin >= start + room or begin + length <= start
            taken.append((segment, start, room))
    for each in taken:
        arena.give_back(each)
    assert len(arena.segments) <= 4  # six messages of at most 1,536 bytes
    whole = [arena.take(SEGMENT) for _ in arena.segments]
    assert {segment for segment, *_ in whole} == set(range(len(arena.segments)))


def test_messages_arrive_whatever_their_size_and_order(pool: RankPool, tmp_path: Path) -> None:
    def check(context: RankContext) -> int:
        box, tags = mailbox(context, tmp_path), list(range(3 * len(SIZES)))
        following, previous = (context.rank + 1) % context.world_size, (context.rank - 1) % context.world_size
        for seed in range(10):
            random.Random(seed).shuffle(tags)
            for tag in tags:
                tensor = content(context.rank, tag)
                box.send(tensor, following, tag)
                tensor.fill_(77)  # a send has finished when it returns
            random.Random(seed + 77).shuffle(tags)
            into = {tag: torch.zeros_like(content(previous, tag)) for tag in tags}
            for tag in tags:
                work = box.receive(into[tag], previous, tag)
                assert work.wait()
                assert work.source_rank() == previous
                assert torch.equal(into[tag], content(previous, tag)), tag
            dist.barrier()
        box.drain(context.group.inner._peers)
        box._reclaim()
        assert box._in_flight == []
        return len(box.arena.segments)

    segments = pool.run(check, tmp_path)
    assert max(segments) < 30  # and not ten times what one round needs


def test_any_source_names_the_sender_and_strided_tensors_are_filled(pool: RankPool, tmp_path: Path) -> None:
    def check(context: RankContext) -> None:
        box = mailbox(context, tmp_path)
        if context.rank:
            box.send(torch.full((3, 2), float(context.rank)), 0, 5)
        for _ in range(context.world_size - 1) if context.rank == 0 else ():
            into = torch.zeros(2, 3).t()
            work = box.receive(into, ANY, 5)
            work.wait()
            assert torch.equal(into, torch.full((3, 2), float(work.source_rank())))
        box.drain(context.group.inner._peers)
        dist.barrier()

    pool.run(check, tmp_path)


def test_a_message_that_does_not_fit_is_refused(pool: RankPool, tmp_path: Path) -> None:
    def check(context: RankContext) -> str:
        box = mailbox(context, tmp_path)
        if context.rank == 1:
            box.send(torch.zeros(8), 0, 9)
        error = ""
        if context.rank == 0:
            with pytest.raises(
                dist.DistBackendError, match="32 bytes from rank 1 does not fit into a tensor of 16"
            ):
                box.receive(torch.zeros(4), 1, 9).wait()
        dist.barrier()
        return error

    pool.run(check, tmp_path)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no GPU on this machine")
@pytest.mark.parametrize(
    "strategy", ["ring", "tree", "hierarchical", "gossip", "parameter-server", "zero-1", "pipeline"]
)
def test_ranks_on_gpus_train_as_over_tcp(strategy: str) -> None:
    losses = []
    for transport in ("tcp", "cuda-ipc"):
        job = small_job(device="cuda", strategy=strategy, world_size=4, transport=transport)
        run = ss.launch(job).wait(110)
        assert run.summary().transport == transport
        losses.append(list(run.metrics()["loss"]))
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)


def test_ranks_on_cpus_are_told_so() -> None:
    run = ss.launch(small_job(strategy="ring", world_size=2, transport="cuda-ipc"))
    with pytest.raises(
        ss.RunFailed, match="transport='cuda-ipc' cannot be used: the ranks are not on GPUs; use"
    ):
        run.wait(110)
