"""The tree against the backend's own all-reduce and against the formula, to the byte."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from conformance.collectives import ODD_SIZES, check_sums, filled
from conformance.ranks import RankPool
from shardscope.analytic import communication as comm
from shardscope.training.collectives import TreeAllReduce
from shardscope.training.context import RankContext


@pytest.mark.parametrize("slice_bytes", [1 << 14, 1 << 20])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.int32])
def test_sums_like_the_backend(pool: RankPool, tmp_path: Path, slice_bytes: int, dtype: torch.dtype) -> None:
    def compare(context: RankContext) -> bool:
        return check_sums(TreeAllReduce(context.group, slice_bytes), context, dtype)

    assert all(pool.run(compare, tmp_path))


def test_counts_the_bytes_of_the_formula(pool: RankPool, tmp_path: Path) -> None:
    def measure(context: RankContext) -> list[dict[str, Any]]:
        tree, rows = TreeAllReduce(context.group, slice_bytes=1 << 16), []
        for n in ODD_SIZES:
            context.meter.drain()
            tree.all_reduce_(filled(n, context.rank, torch.float32))
            rows.append(context.meter.drain()[0]["tree_all_reduce"])
        return rows

    measured = pool.run(measure, tmp_path)
    for i, n in enumerate(ODD_SIZES):
        expected = comm.tree_all_reduce_bytes(n, 4, pool.world_size)
        assert [rows[i]["sent_bytes"] for rows in measured] == expected.tolist()
        assert sum(rows[i]["received_bytes"] for rows in measured) == expected.sum()
        assert all(rows[i]["payload_bytes"] == 4 * n for rows in measured)
        assert expected.sum() == 2 * (pool.world_size - 1) * 4 * n


def test_every_message_is_counted_to_its_peer(pool: RankPool, tmp_path: Path) -> None:
    def measure(context: RankContext) -> dict[str, Any]:
        TreeAllReduce(context.group, slice_bytes=400).all_reduce_(filled(1001, context.rank, torch.float32))
        return context.meter.drain()[0]["tree_all_reduce"]

    edges = {
        2: {(0, 1), (1, 0)},
        3: {(0, 1), (0, 2), (1, 0), (2, 0)},
        4: {(0, 1), (0, 2), (1, 0), (2, 0), (1, 3), (3, 1)},
    }
    rows = pool.run(measure, tmp_path)
    assert {(rank, peer) for rank, row in enumerate(rows) for peer in row["sent_to"]} == edges[
        pool.world_size
    ]
    assert all(size == 4004 for row in rows for size in row["sent_to"].values())
    assert all(row["messages"] == 11 * len(row["sent_to"]) for row in rows)


def test_many_calls_after_another_do_not_mix_their_messages(pool: RankPool, tmp_path: Path) -> None:
    def reduce(context: RankContext) -> bool:
        tree = TreeAllReduce(context.group, slice_bytes=256)
        for n in (1, 700, 3, 1001, 64) * 20:
            total = tree.all_reduce_(filled(n, context.rank))
            expected = sum(filled(n, rank) for rank in range(context.world_size))
            assert torch.equal(total, expected), n
        return True

    assert all(pool.run(reduce, tmp_path))
