"""The ring against the backend's own collectives and against the formulas, to the byte."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from conformance.collectives import ODD_SIZES, check_sums, filled
from conformance.ranks import RankPool
from conformance.wire_bytes import GLOO_HEADER_BYTES, WireBytes, wire_bytes
from shardscope.analytic import communication as comm
from shardscope.training.collectives import RingAllReduce
from shardscope.training.collectives.ring import split_sizes
from shardscope.training.context import RankContext


def quiet_wire() -> WireBytes:
    """The kernel's counters once everything sent has been acknowledged on every rank."""
    dist.barrier()
    time.sleep(0.25)
    return wire_bytes()


@pytest.mark.parametrize("directions", [1, 2])
@pytest.mark.parametrize("slice_bytes", [4096, 1 << 20])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.int32])
def test_sums_like_the_backend(
    pool: RankPool, tmp_path: Path, directions: int, slice_bytes: int, dtype: torch.dtype
) -> None:
    def compare(context: RankContext) -> bool:
        ring = RingAllReduce(context.group, directions=directions, slice_bytes=slice_bytes)
        return check_sums(ring, context, dtype)

    assert all(pool.run(compare, tmp_path))


def test_scatters_and_gathers_uneven_chunks(pool: RankPool, tmp_path: Path) -> None:
    def compare(context: RankContext) -> bool:
        ring = RingAllReduce(context.group)
        for n in ODD_SIZES:
            tensor = filled(n, context.rank)
            whole = tensor.clone()
            dist.all_reduce(whole)
            chunk = ring.reduce_scatter_(tensor)
            assert torch.equal(chunk, whole.split(split_sizes(n, context.world_size))[context.rank]), n
            assert torch.equal(ring.all_gather_(tensor), whole), n
        return True

    assert all(pool.run(compare, tmp_path))


@pytest.mark.parametrize("directions", [1, 2])
def test_counts_the_bytes_of_the_formula(pool: RankPool, tmp_path: Path, directions: int) -> None:
    def measure(context: RankContext) -> list[dict[str, Any]]:
        rows = []
        for n in ODD_SIZES:
            context.meter.drain()
            RingAllReduce(context.group, directions=directions).all_reduce_(
                filled(n, context.rank, torch.float32)
            )
            rows.append(context.meter.drain()[0]["ring_all_reduce"])
        return rows

    measured = pool.run(measure, tmp_path)
    for i, n in enumerate(ODD_SIZES):
        expected = comm.ring_all_reduce_bytes(n, 4, pool.world_size, directions=directions)
        assert [rows[i]["sent_bytes"] for rows in measured] == expected.tolist()
        assert sum(rows[i]["received_bytes"] for rows in measured) == expected.sum()
        assert all(rows[i]["payload_bytes"] == 4 * n for rows in measured)


@pytest.mark.parametrize("phase", ["reduce_scatter", "all_gather"])
def test_each_phase_counts_the_bytes_of_its_formula(pool: RankPool, tmp_path: Path, phase: str) -> None:
    def measure(context: RankContext) -> list[int]:
        sent = []
        for n in ODD_SIZES:
            context.meter.drain()
            getattr(RingAllReduce(context.group), f"{phase}_")(filled(n, context.rank, torch.float32))
            sent.append(context.meter.drain()[0][f"ring_{phase}"]["sent_bytes"])
        return sent

    formula = {"reduce_scatter": comm.ring_reduce_scatter_bytes, "all_gather": comm.ring_all_gather_bytes}[
        phase
    ]
    measured = pool.run(measure, tmp_path)
    for i, n in enumerate(ODD_SIZES):
        assert [sent[i] for sent in measured] == formula(n, 4, pool.world_size).tolist()


def all_done(context: RankContext, folder: Path) -> None:
    """Wait until every rank has its result, and so has read all that was sent to it; by no network."""
    (folder / f"done-{context.rank}").touch()
    while len(list(folder.glob("done-*"))) < context.world_size:
        time.sleep(0.01)


@pytest.mark.skipif(not Path("/proc/self/fd").is_dir(), reason="reads sockets as Linux shows them")
@pytest.mark.parametrize("n", [1001, 500_009])
def test_the_kernel_saw_the_same_bytes(tcp_pool: RankPool, tmp_path: Path, n: int) -> None:
    """Counted by us = sent over TCP, less the headers that gloo adds to each message."""

    def measure(context: RankContext) -> tuple[dict[str, int], int]:
        tensor = filled(n, context.rank, torch.float32)
        before = quiet_wire()
        context.meter.drain()
        RingAllReduce(context.group).all_reduce_(tensor)
        traffic = context.meter.drain()[0]["ring_all_reduce"]
        all_done(context, tmp_path)
        time.sleep(0.25)
        on_wire = wire_bytes() - before
        dist.barrier()
        return traffic, on_wire.sent

    rows = tcp_pool.run(measure, tmp_path)
    on_wire = sum(sent for _, sent in rows)
    messages = sum(traffic["messages"] for traffic, _ in rows)
    assert on_wire - messages * GLOO_HEADER_BYTES == sum(traffic["sent_bytes"] for traffic, _ in rows)


@pytest.mark.skipif(not Path("/proc/self/fd").is_dir(), reason="reads sockets as Linux shows them")
@pytest.mark.parametrize("n", [1001, 500_009, 4_000_001])
def test_the_backends_all_reduce_sends_what_its_formula_says(
    tcp_pool: RankPool, tmp_path: Path, n: int
) -> None:
    def measure(context: RankContext) -> tuple[int, int]:
        tensor = filled(n, context.rank, torch.float32)
        before = quiet_wire()
        context.meter.drain()
        dist.all_reduce(tensor)
        counted = context.meter.drain()[0]["all_reduce"]["sent_bytes"]
        all_done(context, tmp_path)
        time.sleep(0.25)
        on_wire = wire_bytes() - before
        dist.barrier()
        return counted, on_wire.sent

    rows = tcp_pool.run(measure, tmp_path)
    counted, on_wire = sum(c for c, _ in rows), sum(w for _, w in rows)
    assert counted == comm.all_reduce_bytes(4 * n, tcp_pool.world_size)
    headers = on_wire - counted
    assert 0 < headers < 0.05 * counted + 20_000
    assert headers % (GLOO_HEADER_BYTES // 3) == 0
