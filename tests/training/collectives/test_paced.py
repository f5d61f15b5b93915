"""A link made up in user space takes the time that the formulas give a real one.

Lower bounds are exact: nothing may be faster than its formula. Upper bounds take the best of a few repetitions, and
leave room for what a busy machine with two cores adds to it; a pattern that is late gets many further attempts.
"""

from __future__ import annotations

import math
import tempfile
import time
from collections.abc import Callable, Collection
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from conformance.ranks import RankPool
from shardscope.analytic.communication import collective_time
from shardscope.errors import LaunchError
from shardscope.methods.strategies.parameter_server._torch_messages import MessageBuffer
from shardscope.methods.strategies.parameter_server._torch_messages import MessageLink as Messages
from shardscope.spec import Link
from shardscope.training.collectives import RingAllReduce, TreeAllReduce
from shardscope.training.collectives.neighbours import Neighbours
from shardscope.training.collectives.paced_group import PacedGroups, PacedProcessGroup
from shardscope.training.collectives.packets import Packets
from shardscope.training.collectives.switch import SharedFile
from shardscope.training.context import RankContext

REPEATS, ATTEMPTS = 4, 60
ROOM, SLACK_S = 1.35, 5e-3
LINKS = [("100 Mbit/s", "0 s"), ("1 Gbit/s", "5 ms")]


def paced(context: RankContext, link: Link, name: str) -> PacedProcessGroup:
    """All ranks of the pool, on a link."""
    assert context.group is not None
    store = dist.PrefixStore(name, context.group.get_group_store())
    return PacedGroups(link).make(context.group.route, context.meter, "gloo", store)


def timed(context: RankContext, call: Callable[[], Any]) -> list[tuple[float, float]]:
    """When this rank began and ended each repetition, on a clock that all processes share."""
    assert context.group is not None
    times = []
    for _ in range(REPEATS):
        context.group.barrier().wait()
        start = time.monotonic()
        call()
        times.append((start, time.monotonic()))
    return times


def broadcast(group: PacedProcessGroup, tensor: torch.Tensor) -> None:
    options = dist.BroadcastOptions()
    options.rootRank = 0
    group.broadcast([tensor], options).wait()


def push_and_pull(group: PacedProcessGroup, num_elements: int) -> None:
    """All ranks but the first push to it, and pull from it when all have pushed."""
    link, others = Messages(group), range(1, group.size())
    if group.rank():
        answer = MessageBuffer(num_elements)
        got = link.post(answer, 0, 2)
        link.send(MessageBuffer(num_elements), 0, 1, "server_push", step=1).wait()
        got.wait()
        return
    for work in [link.post(MessageBuffer(num_elements), worker, 1) for worker in others]:
        work.wait()
    for work in [
        link.send(MessageBuffer(num_elements), worker, 2, "server_pull", step=1) for worker in others
    ]:
        work.wait()


def all_ways(group: PacedProcessGroup, x: torch.Tensor) -> dict[str, Callable[[], Any]]:
    ring, tree, neighbours = RingAllReduce(group), TreeAllReduce(group), Neighbours(group, x.numel() * 4)
    packets, world_size = Packets(group), group.size()
    part = x[: x.numel() // world_size]
    return {
        "ring": lambda: ring.all_reduce_(x),
        "reduce-scatter": lambda: ring.reduce_scatter_(x),
        "all-gather": lambda: ring.all_gather_(x),
        "tree": lambda: tree.all_reduce_(x),
        "neighbours": lambda: neighbours.average_(x),
        "packets": lambda: packets.all_to_all(x.view(torch.uint8).view(world_size, -1)),
        "parameter server": lambda: push_and_pull(group, x.numel()),
        "gloo's all-reduce": lambda: group.allreduce([x]).wait(),
        "gloo's all-reduce, by its future": lambda: group.allreduce([x]).get_future().wait(),
        "gloo's all-gather": lambda: group.allgather(
            [[torch.empty_like(part) for _ in range(world_size)]], [part]
        ).wait(),
        "gloo's reduce-scatter": lambda: group._reduce_scatter_base(torch.empty_like(part), x).wait(),
        "gloo's broadcast": lambda: broadcast(group, x),
        "a sum under a name": lambda: group.sum_as("consensus", x),
    }


def formulas(link: Link, num_bytes: int, world_size: int) -> dict[str, float]:
    def takes(op: str, algorithm: str, share: float = 1.0, **options: Any) -> float:
        given = {"bandwidth": link.bandwidth, "latency": link.latency_s, "workers": world_size}
        return float(
            collective_time(op=op, algorithm=algorithm, num_bytes=share * num_bytes, **given, **options)
        )

    ring = takes("all_reduce", "ring")
    neighbours = min(2, world_size - 1) * num_bytes / link.bandwidth + link.latency_s
    # rank 1 and 2 below rank 0, rank 3 below rank 1, one segment: two at once take twice as long on their one link
    tensors, messages = {2: (2, 2), 3: (4, 2), 4: (5, 4)}[world_size]
    tree = tensors * num_bytes / link.bandwidth + messages * link.latency_s
    return {
        "ring": ring,
        "reduce-scatter": takes("reduce_scatter", "ring"),
        "all-gather": takes("all_gather", "ring"),
        "tree": tree,
        "neighbours": neighbours,
        "packets": (world_size - 1) / world_size * num_bytes / link.bandwidth + link.latency_s,
        "parameter server": takes("all_reduce", "parameter-server"),
        "gloo's all-reduce": ring,
        "gloo's all-reduce, by its future": ring,
        "gloo's all-gather": takes("all_gather", "ring"),
        "gloo's reduce-scatter": ring,  # gloo runs an all-reduce inside
        "gloo's broadcast": takes("broadcast", "tree"),
        "a sum under a name": ring,
    }


@pytest.mark.parametrize(("bandwidth", "latency"), LINKS)
def test_every_pattern_takes_what_its_formula_says(
    bandwidth: str, latency: str, pool: RankPool, tmp_path: Path
) -> None:
    link = Link(bandwidth=bandwidth, latency=latency)
    num_elements = int(link.bandwidth * 15e-3) // 96 * 24  # 15 ms of the link's time, divisible by 2, 3 and 4

    def measure(
        context: RankContext, attempt: int, late: Collection[str]
    ) -> dict[str, list[tuple[float, float]]]:
        group = paced(context, link, f"{bandwidth}, {latency}, {attempt}")
        with group.pacer.switched(True):
            ways = all_ways(group, torch.ones(num_elements))
            times = {name: timed(context, way) for name, way in ways.items() if name in late}
        group.pacer.close()
        return times

    wanted, best = formulas(link, 4 * num_elements, pool.world_size), dict[str, float]()
    late: dict[str, float] = dict.fromkeys(wanted, math.inf)
    for attempt in range(ATTEMPTS):
        ranks = pool.run(partial(measure, attempt=attempt, late=[*late]), tmp_path)
        for name in late:
            spans = [
                max(end for _, end in row) - min(start for start, _ in row)
                for row in zip(*(times[name] for times in ranks), strict=True)
            ]
            assert min(spans) >= wanted[name], name
            best[name] = min(best.get(name, math.inf), *spans)
        late = {name: best[name] for name in late if best[name] > ROOM * wanted[name] + SLACK_S}
        if not late:
            return
    pytest.fail(f"slower than the formula in {ATTEMPTS} attempts: {late}")


def test_results_and_counted_bytes_are_those_of_the_machines_own_link(pool: RankPool, tmp_path: Path) -> None:
    def both(context: RankContext) -> bool:
        assert context.group is not None
        group = paced(context, Link(bandwidth="1 Gbit/s", latency="1 ms"), "results")
        found = []
        with group.pacer.switched(True):
            for under in (context.group, group):
                context.meter.drain()
                x = torch.rand(10_007, generator=torch.Generator().manual_seed(context.rank))
                kept = [
                    collective(under).all_reduce_(x.clone()) for collective in (RingAllReduce, TreeAllReduce)
                ]
                kept += [Neighbours(under, 4096).average_(x.clone()), under.sum_as("sum", x.clone())]
                found.append((kept, context.meter.drain()[0]))
        group.pacer.close()
        (plain, counted), (slowed, counted_slowed) = found
        return all(map(torch.equal, plain, slowed)) and counted == counted_slowed

    assert all(pool.run(both, tmp_path))


def test_switched_off_a_link_costs_no_time(pool: RankPool, tmp_path: Path) -> None:
    def measure(context: RankContext) -> float:
        group = paced(context, Link(bandwidth="100 kbit/s", latency="30 s"), "off")
        start = time.monotonic()
        RingAllReduce(group).all_reduce_(torch.ones(50_000))
        group.allreduce([torch.ones(50_000)]).wait()
        group.pacer.close()
        return time.monotonic() - start

    assert max(pool.run(measure, tmp_path)) < 15  # paced it would be minutes


def test_whoever_gives_up_or_is_left_alone_is_not_held_up(pool: RankPool, tmp_path: Path) -> None:
    """The message would take a day. One rank lets it go; of the next, it is told that the receiver has left."""

    def measure(context: RankContext) -> list[float]:
        seconds = []
        for number, leave in enumerate(("give up", "is left")):
            group = paced(context, Link(bandwidth=1.0, latency=0.0), leave)
            start, carrier = time.monotonic(), group.transport(torch.device("cpu"))
            with group.pacer.switched(True):
                if context.rank == 0:
                    work = carrier.send([torch.ones(86_400)], 1, 77 + number)
                    with pytest.raises(RuntimeError, match="Timed out"):
                        work.wait(timedelta(milliseconds=20))
                    if leave == "give up":
                        group.give_up()
                    work.wait()
                elif context.rank == 1:
                    work = carrier.recv([torch.empty(86_400)], 0, 77 + number)
                    if leave == "is left":
                        group.pacer.close()  # its lock goes, as when its process ends
                    work.wait()
            group.pacer.close()
            seconds.append(time.monotonic() - start)
        return seconds

    assert max(max(row) for row in pool.run(measure, tmp_path)) < 60


def test_ranks_on_another_machine_are_refused() -> None:
    store = dist.HashStore()
    store.set("shared-file", "elsewhere:/dev/shm/shardscope-link-x")
    with pytest.raises(
        LaunchError, match=r"ranks are on elsewhere and .*; run all ranks on one machine, or omit"
    ):
        SharedFile(store, 1, 2, 8)


def test_nothing_is_left_behind(pool: RankPool, tmp_path: Path) -> None:
    def use(context: RankContext) -> list[bool]:
        made, mkstemp = [], tempfile.mkstemp

        def noted(**options: Any) -> tuple[int, str]:
            made.append(mkstemp(**options))
            return made[-1]

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(tempfile, "mkstemp", noted)
            group = paced(context, Link(bandwidth="1 Gbit/s", latency="0 s"), "files")
        left = [Path(path).exists() for _, path in made]
        group.pacer.close()
        return left

    first, *others = pool.run(use, tmp_path)
    assert first, "rank 0 makes the files"
    assert not any(first)
    assert not any(others)
