"""Rings inside nodes and across them, against the backend's own all-reduce and against the formula, to the byte."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from conformance.collectives import ODD_SIZES, check_sums, filled
from conformance.ranks import RankPool
from shardscope.analytic import communication as comm
from shardscope.errors import SpecError
from shardscope.training.collectives import HierarchicalAllReduce
from shardscope.training.context import RankContext


def node_sizes(world_size: int) -> list[int]:
    return [size for size in range(1, world_size + 1) if world_size % size == 0]


@pytest.mark.parametrize("slice_bytes", [1 << 14, 1 << 20])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_sums_like_the_backend(pool: RankPool, tmp_path: Path, slice_bytes: int, dtype: torch.dtype) -> None:
    sizes = node_sizes(pool.world_size)

    def compare(context: RankContext) -> bool:
        rings = [HierarchicalAllReduce(context.group, size, slice_bytes) for size in sizes]
        return all(check_sums(ring, context, dtype) for ring in rings)

    assert all(pool.run(compare, tmp_path))


def test_counts_the_bytes_of_the_formula(pool: RankPool, tmp_path: Path) -> None:
    sizes = node_sizes(pool.world_size)

    def measure(context: RankContext) -> list[dict[str, dict[str, Any]]]:
        rows = []
        for size in sizes:
            rings = HierarchicalAllReduce(context.group, size)
            for n in ODD_SIZES:
                context.meter.drain()
                rings.all_reduce_(filled(n, context.rank, torch.float32))
                rows.append(context.meter.drain()[0])
        return rows

    measured = pool.run(measure, tmp_path)
    cases = [(size, n) for size in sizes for n in ODD_SIZES]
    for i, (size, n) in enumerate(cases):
        expected = comm.hierarchical_all_reduce_bytes(n, 4, pool.world_size, size)
        rows = [rank[i] for rank in measured]
        sent = [sum(row["sent_bytes"] for row in phases.values()) for phases in rows]
        received = sum(row["received_bytes"] for phases in rows for row in phases.values())
        assert sent == expected.total.tolist()
        assert received == expected.total.sum() == 2 * (pool.world_size - 1) * 4 * n
        if 1 < size < pool.world_size:
            phases = ("reduce_scatter", "all_reduce", "all_gather")
            by_phase = [[row[f"ring_{phase}"]["sent_bytes"] for row in rows] for phase in phases]
            assert by_phase == [part.tolist() for part in expected]


@pytest.mark.ranks(4)  # two nodes of two
def test_only_equal_positions_talk_across_nodes(pool: RankPool, tmp_path: Path) -> None:
    def measure(context: RankContext) -> dict[str, list[int]]:
        HierarchicalAllReduce(context.group, 2).all_reduce_(filled(1001, context.rank))
        return {name: sorted(row["sent_to"]) for name, row in context.meter.drain()[0].items()}

    partners = [(1, 2), (0, 3), (3, 0), (2, 1)]
    for (inside, across), peers in zip(partners, pool.run(measure, tmp_path), strict=True):
        assert peers == {
            "ring_reduce_scatter": [inside],
            "ring_all_gather": [inside],
            "ring_all_reduce": [across],
        }


def test_nodes_that_do_not_divide_the_ranks_are_refused(pool: RankPool, tmp_path: Path) -> None:
    def build(context: RankContext) -> str:
        with pytest.raises(SpecError) as refused:
            HierarchicalAllReduce(context.group, context.world_size + 1)
        return str(refused.value)

    assert "does not divide" in pool.run(build, tmp_path)[0]
