"""The axes of real ranks: who is in which group, and what their meter says."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from conformance.ranks import RankPool
from shardscope.runlog.axes import axis_groups
from shardscope.training.collectives.ring import RingAllReduce
from shardscope.training.context import RankContext
from shardscope.training.mesh import RankMesh

SHAPE = {"data": 2, "tensor": 2}


def test_neighbours_are_in_one_group_of_the_last_axis() -> None:
    assert axis_groups({"pipeline": 2, "data": 2, "tensor": 2}, "tensor") == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert axis_groups({"pipeline": 2, "data": 2, "tensor": 2}, "pipeline") == [
        [0, 4],
        [1, 5],
        [2, 6],
        [3, 7],
    ]
    assert axis_groups({"pipeline": 2, "data": 3, "tensor": 2}, "data")[2] == [6, 8, 10]


def _sums(context: RankContext) -> Any:
    mesh = RankMesh.open(SHAPE, context, timeout_s=60)
    found = {}
    context.meter.logged_step = context.meter.step = 1
    for axis in SHAPE:
        own = mesh.context(context, axis)
        assert own.group is not None
        assert own.whole is context
        ring = RingAllReduce(own.group).all_reduce_(torch.full((8,), float(context.rank)))
        stock = torch.full((8,), float(context.rank))
        dist.all_reduce(stock, group=own.group)
        found[axis] = (own.rank, own.world_size, float(ring[0]), float(stock[0]))
    traffic, spans = context.meter.drain()
    rows = context.meter.drain_messages()
    context.meter.logged_step = 0
    return found, traffic, {span[1] for span in spans}, {(row[0], row[2]) for row in rows}


@pytest.mark.ranks(4)
def test_groups_names_and_peers_are_those_of_the_axis(pool: RankPool, tmp_path: Path) -> None:
    results = pool.run(_sums, tmp_path)
    for rank, (found, traffic, spans, peers) in enumerate(results):
        over, beside = (rank + 2) % 4, rank ^ 1
        assert found == {
            "data": (rank // 2, 2, float(rank + over), float(rank + over)),
            "tensor": (rank % 2, 2, float(rank + beside), float(rank + beside)),
        }
        names = {f"{axis}:{name}" for axis in SHAPE for name in ("ring_all_reduce", "all_reduce")}
        assert {*traffic} == spans == names
        assert [*traffic["data:ring_all_reduce"]["sent_to"]] == [over]
        assert [*traffic["tensor:ring_all_reduce"]["sent_to"]] == [beside]
        assert peers == {("data:ring_all_reduce", over), ("tensor:ring_all_reduce", beside)}
    total = sum(each[1]["data:all_reduce"]["sent_bytes"] for each in results)
    assert total == 2 * 2 * 8 * 4  # in two groups, each twice the tensor


def _opened_again(context: RankContext) -> bool:
    first = RankMesh.open(SHAPE, context, timeout_s=60)
    return RankMesh.open(SHAPE, context, timeout_s=60) is first


@pytest.mark.ranks(4)
def test_groups_are_created_once(pool: RankPool, tmp_path: Path) -> None:
    assert pool.run(_opened_again, tmp_path) == [True] * 4


def _nodes(context: RankContext) -> list[int | None]:
    ours = replace(context, local_world_size=2)  # as on two machines
    mesh = RankMesh.open(SHAPE, ours, timeout_s=60)
    return [mesh.context(ours, axis).local_world_size for axis in SHAPE]


@pytest.mark.ranks(4)
def test_an_axis_knows_how_many_of_its_ranks_are_on_a_machine(pool: RankPool, tmp_path: Path) -> None:
    assert pool.run(_nodes, tmp_path) == [[1, 2]] * 4
