"""The conformance class that every compression method passes, on real ranks.

A test module for a family subclasses `CompressorConformance` and names its `Compression`s. The methods' buckets are
odd-shaped tensors that differ from rank to rank. What is checked: all ranks end with the same bits; what crosses the
wire is what the formula says; zeros stay zeros; NaN and infinities are refused by name; what a compressor remembers
survives a restart, so that the next step is the same to the bit; what comes out is as near the mean as is claimed.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch

import shardscope as ss
from conformance.ranks import RankPool, over_both
from shardscope.analytic.communication import ring_all_reduce_bytes
from shardscope.training.collectives import RingAllReduce
from shardscope.training.collectives.packets import Packets
from shardscope.training.compression import Bucket, Carrier, Compressor, NotFinite, build_compressor
from shardscope.training.compression.packed import Packed
from shardscope.training.context import RankContext

SHAPES: list[tuple[int, ...]] = [(33, 17), (5,), (1,), (7, 3, 11), (1031,)]
"""Odd, and small enough to be quick; together they divide by nothing."""


def job_of(compression: ss.Compression, world_size: int) -> ss.Job:
    """A job that carries the method; steps enough for warm-ups."""
    optimizer = {"onebit-lamb": "lamb"}.get(compression.name, "adamw")
    if compression.name == "dgc":
        optimizer = "sgd"
    return ss.Job(
        model="mlp", data="digits", batch=24, compression=compression, world_size=world_size, optimizer=optimizer,
        steps=10, seed=3,
    )  # fmt: skip


def carrier_of(context: RankContext, seed: int = 3) -> Carrier:
    """Our ring, and packets among all ranks."""
    assert context.group is not None
    ring = RingAllReduce(context.group)
    return Carrier(ring.all_reduce_, Packets(context.group), context.meter, seed, ring.reduce_scatter_)


def gradients(
    rank: int, step: int = 1, shapes: Sequence[tuple[int, ...]] = SHAPES, scale: float = 1.0
) -> torch.Tensor:
    """Different on every rank and at every step, with blocks of very different size in them."""
    generator = torch.Generator().manual_seed(1000 * step + rank)
    flat = torch.randn(sum(math.prod(shape) for shape in shapes), generator=generator) * scale
    flat[::97] *= 30
    return flat


def bucket_of(flat: torch.Tensor, step: int = 1, shapes: Sequence[tuple[int, ...]] = SHAPES) -> Bucket:
    """All of it in one bucket."""
    return Bucket([f"p{i}" for i in range(len(shapes))], [torch.Size(s) for s in shapes], flat, step)


def exchange(
    compressor: Compressor,
    context: RankContext,
    flat: torch.Tensor,
    step: int = 1,
    shapes: Sequence[tuple[int, ...]] = SHAPES,
) -> torch.Tensor:
    """One step's exchange of one bucket; returns what this rank ends with."""
    compressor.begin_step(step)
    bucket = bucket_of(flat.clone(), step, shapes)
    compressor.mean_(bucket, carrier_of(context))
    return bucket.flat


def make(compression: ss.Compression, context: RankContext) -> Compressor:
    """A fresh compressor for this rank."""
    compressor = build_compressor(job_of(compression, context.world_size))
    assert compressor is not None
    return compressor


def awkward_sizes(compressor: Compressor, world_size: int) -> list[int]:
    """Elements of buckets around what belongs together: one, one block more or less, and a block for each rank."""
    align = compressor.codec.align if isinstance(compressor, Packed) else getattr(compressor, "block", 1)
    return sorted({1, max(align - 1, 1), align, align + 1, world_size * align})


def sent_bytes(context: RankContext) -> int:
    """Bytes this rank has sent since the meter was last drained."""
    return sum(row["sent_bytes"] for row in context.meter.drain()[0].values())


class CompressorConformance:
    """Subclass it as ``Test...``, set `methods`, and each is held to what it claims at W = 2, 3 and 4."""

    methods: ClassVar[list[ss.Compression]]
    near: ClassVar[dict[str, float]] = {}
    """By name: the largest relative error of a mean without feedback; methods that are not in it are not asked."""

    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        over_both(metafunc)
        if "compression" in metafunc.fixturenames:
            metafunc.parametrize("compression", self.methods, ids=[m.label for m in self.methods])

    def test_all_ranks_end_with_the_same_bits(
        self, compression: ss.Compression, pool: RankPool, tmp_path: Path
    ) -> None:
        def body(context: RankContext) -> list[torch.Tensor]:
            compressor = make(compression, context)
            return [exchange(compressor, context, gradients(context.rank, step), step) for step in (1, 2, 3)]

        first, *others = pool.run(body, tmp_path)
        for other in others:
            assert all(torch.equal(a, b) for a, b in zip(first, other, strict=True))
        assert all(torch.isfinite(flat).all() for flat in first)

    def test_the_wire_carries_what_the_formula_says(
        self, compression: ss.Compression, pool: RankPool, tmp_path: Path
    ) -> None:
        def body(context: RankContext) -> int:
            compressor = make(compression, context)
            context.meter.drain()
            exchange(compressor, context, gradients(context.rank))
            return sent_bytes(context)

        assert pool.run(body, tmp_path) == self.expected_bytes(compression, pool.world_size)

    def expected_bytes(self, compression: ss.Compression, world_size: int) -> list[int]:
        """By rank, from the formula."""
        return list(compression.bucket_bytes(SHAPES, world_size))

    def test_buckets_of_awkward_sizes_meet(
        self, compression: ss.Compression, pool: RankPool, tmp_path: Path
    ) -> None:
        def body(context: RankContext) -> list[tuple[int, int, torch.Tensor]]:
            rows = []
            for size in awkward_sizes(make(compression, context), context.world_size):
                shapes, compressor = [(size,)], make(compression, context)
                context.meter.drain()
                came = exchange(compressor, context, gradients(context.rank, 1, shapes), 1, shapes)
                rows.append((size, sent_bytes(context), came))
            return rows

        ranks = pool.run(body, tmp_path)
        for rows in zip(*ranks, strict=True):
            size, came = rows[0][0], rows[0][2]
            stated = compression.bucket_bytes([(size,)], pool.world_size)
            assert [row[1] for row in rows] == list(stated), size
            assert all(torch.equal(row[2], came) for row in rows), size
            assert came.shape == (size,)
            assert came.isfinite().all()

    def test_zeros_stay_zeros(self, compression: ss.Compression, pool: RankPool, tmp_path: Path) -> None:
        def body(context: RankContext) -> torch.Tensor:
            return exchange(make(compression, context), context, torch.zeros_like(gradients(0)))

        for flat in pool.run(body, tmp_path):
            assert not flat.any()

    @pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
    def test_what_is_not_finite_is_refused_by_name(
        self, compression: ss.Compression, bad: float, pool: RankPool, tmp_path: Path
    ) -> None:
        def body(context: RankContext) -> str:
            flat = gradients(context.rank)
            flat[33 * 17 + 2] = bad  # in the second tensor
            compressor = make(compression, context)
            try:
                exchange(compressor, context, flat)
            except NotFinite as error:
                return str(error)
            return "went through"

        for message in pool.run(body, tmp_path):
            assert "'p1'" in message, message
            assert compression.name in message

    def test_what_is_remembered_survives_a_restart(
        self, compression: ss.Compression, pool: RankPool, tmp_path: Path
    ) -> None:
        def body(context: RankContext) -> tuple[torch.Tensor, torch.Tensor]:
            first = make(compression, context)
            for step in (1, 2):
                exchange(first, context, gradients(context.rank, step), step)
            second = make(compression, context)
            second.load_state_dict({key: value.clone() for key, value in first.state_dict().items()})
            flat = gradients(context.rank, 3)
            return exchange(first, context, flat, 3), exchange(second, context, flat, 3)

        for went_on, resumed in pool.run(body, tmp_path):
            assert torch.equal(went_on, resumed)

    def test_the_result_is_near_the_mean(
        self, compression: ss.Compression, pool: RankPool, tmp_path: Path
    ) -> None:
        bound = self.near.get(compression.name)
        if bound is None:
            pytest.skip(f"{compression.name} does not claim to be near the mean of a single step")

        def body(context: RankContext) -> torch.Tensor:
            return exchange(make(compression, context), context, gradients(context.rank))

        mean = sum(gradients(rank) for rank in range(pool.world_size)) / pool.world_size
        error = (pool.run(body, tmp_path)[0] - mean).norm() / mean.norm()
        assert float(error) <= bound


def ring_bytes(num_bytes: int, element_bytes: int, world_size: int) -> list[int]:
    """What each rank sends to add up a packet of so many bytes over our ring."""
    sent: Any = ring_all_reduce_bytes(num_bytes // element_bytes, world_size, element_bytes)
    return [int(value) for value in sent]
