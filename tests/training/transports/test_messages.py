"""Messages over shared memory: any order, any size, any thread."""

from __future__ import annotations

import random
import re
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from conformance.ranks import RankPool
from shardscope.training.context import RankContext
from shardscope.training.transports.shm.layout import SharedMemoryLayout
from shardscope.training.transports.shm.pipe import PIECE_BYTES

PIPE = SharedMemoryLayout(4).pipe_bytes
SIZES = [0, 1, 63, 64, 65, 1001, PIECE_BYTES, PIECE_BYTES + 1, PIPE - 64, PIPE, PIPE + 1, 3 * PIPE + 77]
CPU = torch.device("cpu")


def content(source: int, tag: int, size: int) -> Tensor:
    """Different for every message."""
    generator = torch.Generator().manual_seed(1000 * source + tag)
    return torch.randint(0, 256, (size,), generator=generator, dtype=torch.uint8)


def neighbours(context: RankContext) -> tuple[int, int]:
    """The next and the previous rank."""
    return (context.rank + 1) % context.world_size, (context.rank - 1) % context.world_size


def test_all_ranks_send_at_once_messages_larger_than_the_pipe(pool: RankPool, tmp_path: Path) -> None:
    def check(context: RankContext) -> None:
        transport = context.group.transport(CPU)
        following, previous = neighbours(context)
        for tag, size in enumerate(SIZES):
            send = transport.send([content(context.rank, tag, size)], following, tag)
            received = torch.zeros(size, dtype=torch.uint8)
            transport.recv([received], previous, tag).wait()
            send.wait()
            assert torch.equal(received, content(previous, tag, size)), size

    pool.run(check, tmp_path)


@pytest.mark.parametrize("is_posted_first", [True, False])
def test_a_message_is_added_to_its_tensor(pool: RankPool, tmp_path: Path, is_posted_first: bool) -> None:
    def check(context: RankContext) -> None:
        transport = context.group.transport(CPU)
        following, previous = neighbours(context)
        for tag, size in enumerate(SIZES):
            own, theirs = (
                content(rank, tag, size // 8 * 8).view(torch.int64) for rank in (context.rank, previous)
            )
            total = own.clone()
            if is_posted_first:
                receive = transport.recv_add([total], previous, tag)
            send = transport.send([own], following, tag)
            if not is_posted_first:  # a later message has arrived, so this one is kept
                late = transport.send([torch.zeros(1)], following, 1000)
                transport.recv([torch.zeros(1)], previous, 1000).wait()
                receive = transport.recv_add([total], previous, tag)
                late.wait()
            receive.wait()
            send.wait()
            assert torch.equal(total, own + theirs), size

    pool.run(check, tmp_path)


def test_a_message_of_another_size_is_not_added(pool: RankPool, tmp_path: Path) -> None:
    def check(context: RankContext) -> None:
        transport, tensor = context.group.transport(CPU), torch.zeros(4)
        following, previous = neighbours(context)
        send = transport.send([torch.ones(3)], following, 0)
        with pytest.raises(RuntimeError, match="of 12 bytes .* of 16 bytes"):
            transport.recv_add([tensor], previous, 0).wait()
        send.wait()
        assert not tensor.any()

    pool.run(check, tmp_path)


def test_tags_match_in_any_order(pool: RankPool, tmp_path: Path) -> None:
    def check(context: RankContext) -> None:
        transport, tags = context.group.transport(CPU), list(range(len(SIZES)))
        for seed in range(5):
            there, back = list(tags), list(tags)
            random.Random(seed).shuffle(there)
            random.Random(seed + 77).shuffle(back)
            following, previous = neighbours(context)
            sends = [
                transport.send([content(context.rank, tag, SIZES[tag])], following, tag) for tag in there
            ]
            buffers = {tag: torch.zeros(SIZES[tag], dtype=torch.uint8) for tag in tags}
            receives = {tag: transport.recv([buffers[tag]], previous, tag) for tag in back}
            for tag in reversed(back):
                receives[tag].wait()
                assert torch.equal(buffers[tag], content(previous, tag, SIZES[tag])), tag
            for send in sends:
                send.wait()

    pool.run(check, tmp_path)


def test_messages_of_one_tag_arrive_in_the_order_in_which_they_were_sent(
    pool: RankPool, tmp_path: Path
) -> None:
    def check(context: RankContext) -> None:
        following, previous = neighbours(context)
        sends = [dist.isend(torch.tensor([number]), following, tag=5) for number in range(50)]
        late = dist.isend(torch.tensor([77]), following, tag=6)
        received = torch.empty(1, dtype=torch.int64)
        dist.recv(received, previous, tag=6)  # the others are kept
        assert received.item() == 77
        for number in range(50):
            dist.recv(received, previous, tag=5)
            assert received.item() == number
        for work in [*sends, late]:
            work.wait()

    pool.run(check, tmp_path)


def test_threads_of_a_rank_wait_for_their_own_messages(pool: RankPool, tmp_path: Path) -> None:
    def check(context: RankContext) -> None:
        transport = context.group.transport(CPU)
        following, previous = neighbours(context)

        def exchange(lane: int) -> None:
            for number in range(30):
                tag, size = 1000 * lane + number, SIZES[number % len(SIZES)]
                received = torch.zeros(size, dtype=torch.uint8)
                receive = transport.recv([received], previous, tag)
                send = transport.send([content(context.rank, tag, size)], following, tag)
                receive.wait()
                send.wait()
                assert torch.equal(received, content(previous, tag, size))

        with ThreadPoolExecutor(3) as threads:
            for future in [threads.submit(exchange, lane) for lane in range(3)]:
                future.result()

    pool.run(check, tmp_path)


def test_a_large_message_arrives_while_both_sides_do_something_else(pool: RankPool, tmp_path: Path) -> None:
    """The receive is posted, and nobody waits for a message: the sender and the receiver meet in gloo."""

    def check(context: RankContext) -> None:
        following, previous = neighbours(context)
        received = torch.empty(4 * PIPE, dtype=torch.uint8)
        receive = dist.irecv(received, previous)
        send = dist.isend(content(context.rank, 3, 4 * PIPE), following)
        while not (send.is_completed() and receive.is_completed()):
            threading.Event().wait(0.001)
        assert torch.equal(received, content(previous, 3, 4 * PIPE))
        send.wait(), receive.wait()

    pool.run(check, tmp_path)


def test_asking_whether_a_message_has_arrived_moves_it(pool: RankPool, tmp_path: Path) -> None:
    def check(context: RankContext) -> None:
        transport = context.group.transport(CPU)
        following, previous = neighbours(context)
        for tag, size in enumerate(SIZES):
            received = torch.zeros(size, dtype=torch.uint8)
            receive = transport.recv([received], previous, tag)
            send = transport.send([content(context.rank, tag, size)], following, tag)
            while not receive.is_completed() or not send.is_completed():
                pass
            assert torch.equal(received, content(previous, tag, size)), size

    pool.run(check, tmp_path)


def test_a_receive_from_any_rank_reports_the_sender(pool: RankPool, tmp_path: Path) -> None:
    def check(context: RankContext) -> None:
        if context.rank:
            dist.send(torch.full((3,), context.rank), dst=0, tag=9)
        else:
            seen = set()
            for _ in range(context.world_size - 1):
                received = torch.empty(3, dtype=torch.int64)
                source = dist.recv(received, tag=9)
                assert received.tolist() == [source] * 3
                seen.add(source)
            assert seen == set(range(1, context.world_size))

    pool.run(check, tmp_path)


def test_tags_that_occurred_once_take_no_memory(pool: RankPool, tmp_path: Path) -> None:
    def check(context: RankContext) -> None:
        transport = context.group.transport(CPU)
        following, previous = neighbours(context)
        received = torch.empty(3)
        for tag in range(0, 200, 2):
            sends = [transport.send([torch.ones(3)], following, tag + i) for i in (0, 1)]
            for i in (1, 0):
                transport.recv([received], previous, tag + i).wait()
            for send in sends:
                send.wait()
        mailbox = transport._mailbox
        assert (mailbox._posted, mailbox._kept, mailbox.num_unfinished) == ({}, {}, 0)

    pool.run(check, tmp_path)


def test_batches_of_messages(pool: RankPool, tmp_path: Path) -> None:
    def check(context: RankContext) -> None:
        following, previous = neighbours(context)
        received = torch.empty(1001)
        ops = [
            dist.P2POp(dist.isend, torch.full((1001,), float(context.rank)), following),
            dist.P2POp(dist.irecv, received, previous),
        ]
        for work in dist.batch_isend_irecv(ops):
            work.wait()
        assert (received == previous).all()

    pool.run(check, tmp_path)


def test_tensors_that_are_not_contiguous_and_buffers_that_are_too_large(
    pool: RankPool, tmp_path: Path
) -> None:
    def check(context: RankContext) -> None:
        transport = context.group.transport(CPU)
        following, previous = neighbours(context)
        table = torch.arange(12.0).view(3, 4) + context.rank
        sends = [
            transport.send([table.t()], following, 1),
            transport.send([table.view(-1)[:5]], following, 2),
        ]
        transposed, large = torch.empty(3, 4).t(), torch.full((8,), -1.0)
        transport.recv([transposed], previous, 1).wait()
        transport.recv([large], previous, 2).wait()
        assert torch.equal(transposed, (torch.arange(12.0).view(3, 4) + previous).t())
        assert large.tolist() == [previous + i for i in range(5)] + [-1.0] * 3
        for send in sends:
            send.wait()

    pool.run(check, tmp_path)


def test_a_message_that_does_not_fit_is_refused_with_both_sizes(pool: RankPool, tmp_path: Path) -> None:
    def check(context: RankContext) -> None:
        transport = context.group.transport(CPU)
        following, previous = neighbours(context)
        transport.send([torch.ones(5)], following, 1)
        with pytest.raises(
            dist.DistBackendError, match=rf"20 bytes from rank {previous} does not fit into .* 8 bytes"
        ):
            transport.recv([torch.ones(2)], previous, 1).wait()
        transport.send([torch.ones(2)], following, 1).wait()
        transport.recv([torch.ones(2)], previous, 1).wait()

    pool.run(check, tmp_path)


def failure_of(call: Callable[[], object]) -> str:
    """The message of the error that a call raises."""
    with pytest.raises(RuntimeError) as caught:
        call()
    return str(caught.value)


def test_waiting_too_long_ends_the_waits_of_all_ranks(tmp_path: Path) -> None:
    def wait(context: RankContext) -> str:
        receive = context.group.transport(CPU).recv([torch.ones(2)], 1 - context.rank, 1)
        return failure_of(lambda: receive.wait(timedelta(milliseconds=50) if context.rank == 0 else None))

    pool = RankPool(2)
    try:
        first, second = pool.run(wait, tmp_path)
    finally:
        pool.close()
    assert (
        first
        == "this rank waited too long: Timed out waiting 50ms, while this rank was waiting for a message from rank 1"
    )
    assert second == (
        "Connection closed by peer: rank 0 has left the group, while this rank was waiting for a message from rank 0"
    )


@pytest.mark.slow
@pytest.mark.parametrize("transport", ["auto", "tcp"])
@pytest.mark.parametrize("is_own", [True, False], ids=["own time-out", "time-out of the group"])
def test_a_barrier_that_waits_too_long_says_what_torchs_tests_look_for(
    tmp_path: Path, transport: str, *, is_own: bool
) -> None:
    def wait(context: RankContext) -> str:
        group = dist.new_group(timeout=timedelta(seconds=60 if is_own else 0.2))
        if context.rank == 1:
            return ""
        own = timedelta(milliseconds=200) if is_own else None
        return failure_of(lambda: dist.barrier(group, timeout=own))

    pool = RankPool(2, transport=transport)
    try:
        told, _ = pool.run(wait, tmp_path)
    finally:
        pool.close()
    assert re.search(" (Timed out|closed|timeout) ", told)


@pytest.mark.slow
def test_a_message_that_arrived_in_part_before_its_receive_does_not_keep_its_sender_waiting(
    tmp_path: Path,
) -> None:
    """Its receiver does something else in the meantime: it waits for all ranks."""
    pool = RankPool(3)

    def check(context: RankContext) -> None:
        transport, large = context.group.transport(CPU), torch.zeros(16 << 20, dtype=torch.uint8)
        receive = None
        if context.rank == 0:
            send = transport.send([large.fill_(7)], 1, 1)
        if context.rank == 2:
            transport.send([torch.zeros(8, dtype=torch.uint8)], 1, 9).wait()
        dist.barrier()
        if context.rank == 1:
            transport.recv_anysource(
                [torch.zeros(8, dtype=torch.uint8)], 9
            ).wait()  # keeps a part of the large one
            receive = transport.recv([large], 0, 1)
        if context.rank == 0:
            end = time.monotonic() + 30
            while not send.is_done and time.monotonic() < end:  # `is_completed` would move it on
                time.sleep(0.01)
            assert send.is_done
        dist.barrier()
        if receive is not None:
            receive.wait()
            assert bool((large == 7).all())

    try:
        pool.run(check, tmp_path)
    finally:
        pool.close()
