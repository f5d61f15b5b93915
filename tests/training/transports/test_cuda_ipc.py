"""Messages between devices: the protocol on files that stand in for GPU memory, and the transport itself on GPUs."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import shardscope as ss
from conformance.ranks import RankPool
from conformance.runs import small_job
from shardscope.training.context import RankContext
from shardscope.training.transports.cuda_ipc.collectives import DeviceSlots, StagedCollectives
from shardscope.training.transports.cuda_ipc.memory import Arena, check_sharing
from shardscope.training.transports.cuda_ipc.messages import DeviceMailbox
from shardscope.training.transports.shm import CannotShare
from shardscope.training.transports.shm.messages import ANY
from training.transports.device_files import Files

SEGMENT = 4096
SIZES = [0, 1, 511, 512, 513, SEGMENT, SEGMENT + 1, 10 * SEGMENT + 7]


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


def test_ranks_find_out_that_they_cannot_open_each_others_memory(pool: RankPool, tmp_path: Path) -> None:
    class Elsewhere(Files):
        def open(self, exported: str) -> Tensor:
            if f"/{self._rank}-" not in exported and self._rank == 1:
                raise RuntimeError("invalid device context\n(and a stack trace)")
            return super().open(exported)

    def check(context: RankContext) -> str:
        store = context.group.get_group_store()
        for name, kind in (("good", Files), ("bad", Elsewhere)):
            folder = tmp_path / name
            folder.mkdir(exist_ok=True)
            part = dist.PrefixStore(str(folder), store)
            try:
                check_sharing(kind(folder, context.rank), part, context.rank, context.world_size)
            except CannotShare as error:
                return f"{name}: {error}"
        return "never refused"

    for said in pool.run(check, tmp_path):
        assert (
            said == "bad: the ranks cannot open each other's GPU memory (rank 1: invalid device context)"
        ), said


def test_collectives_in_device_memory_follow_those_in_cpu_memory(pool: RankPool, tmp_path: Path) -> None:
    """With sizes from nothing to several slots, in an order that mixes them with those in CPU memory."""

    class Small(DeviceSlots):
        small_bytes = 64

    def check(context: RankContext) -> None:
        inner, world = context.group.inner, context.world_size
        store = dist.PrefixStore(str(tmp_path), context.group.get_group_store())
        in_slots = Small(
            inner._peers, inner._barrier, 60.0,
            memory=Files(tmp_path, context.rank), store=store, slot_bytes=SEGMENT,
        )  # fmt: skip
        draws, staged = random.Random(world), StagedCollectives(inner._in_ram)
        for case in range(60):
            count, dtype = draws.choice([0, 1, 15, 16, 17, 700, 1024, 4000]), torch.float64
            if case % 2:
                dtype = draws.choice([torch.float32, torch.bfloat16])
            own = torch.randn(
                world * count, generator=torch.Generator().manual_seed(case * world + context.rank)
            )
            own = own.to(dtype)
            slots = draws.choice([in_slots, staged])
            for kind in draws.sample(["sum", "scatter", "gather", "broadcast"], 2):
                ours, theirs = own.clone(), own.clone()
                if kind == "sum":
                    slots.all_reduce_(ours)
                    dist.all_reduce(theirs)
                elif kind == "broadcast":
                    slots.broadcast_(ours, case % world)
                    dist.broadcast(theirs, case % world)
                elif kind == "scatter":
                    ours, theirs = own.new_empty(count), own.new_empty(count)
                    slots.reduce_scatter(ours, list(own.view(world, -1)))
                    dist.reduce_scatter_tensor(theirs, own)
                else:
                    ours, theirs = own.new_empty(world, world * count), own.new_empty(world * world * count)
                    slots.all_gather(list(ours), own)
                    dist.all_gather_into_tensor(theirs, own)
                assert torch.equal(ours.view(-1), theirs), (case, kind)

    pool.run(check, tmp_path)


def make_wide_model() -> torch.nn.Module:
    """A model whose messages are too large to be copied through the CPU."""
    hidden = [torch.nn.Sequential(torch.nn.Linear(size, 4096), torch.nn.ReLU()) for size in (64, 4096, 4096)]
    return torch.nn.Sequential(torch.nn.Flatten(), *hidden, torch.nn.Linear(4096, 10))


ON_GPU = [
    "all-reduce", "ring", "tree", "hierarchical", "gossip", "parameter-server", "zero-1", "zero-2", "zero-3",
    "pipeline", ss.Zero2(collectives="backend"), ss.Zero3(collectives="backend"), ss.Zero3(offload=True),
]  # fmt: skip


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no GPU on this machine")
@pytest.mark.parametrize("strategy", ON_GPU, ids=str)
@pytest.mark.parametrize("model", ["mlp", make_wide_model])
def test_ranks_on_gpus_train_as_over_tcp(strategy: str | ss.Strategy, model: Any) -> None:
    losses = []
    for transport in ("tcp", "auto"):
        job = small_job(
            device="cuda", strategy=strategy, world_size=4, transport=transport, model=model, batch=512
        )
        run = ss.launch(job).wait(110)
        assert run.summary().transport == {"tcp": "tcp", "auto": "cuda-ipc"}[transport]
        losses.append(list(run.metrics()["loss"]))
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)


def test_ranks_on_cpus_are_told_so() -> None:
    run = ss.launch(small_job(strategy="ring", world_size=2, transport="cuda-ipc"))
    with pytest.raises(
        ss.RunFailed, match="transport='cuda-ipc' cannot be used: the ranks are not on GPUs; use"
    ):
        run.wait(110)
