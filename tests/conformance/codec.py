"""The conformance class that every codec passes, in one process: what is claimed of a packet holds for it.

A test module for a family subclasses `CodecConformance` and names its `Compression`s. Each is built for both routes,
compiled and plain torch; where numba is missing, the compiled ones are skipped.
"""

from __future__ import annotations

import importlib.util
from typing import ClassVar

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

import shardscope as ss
from conformance.compressor import job_of
from shardscope.training.compression.codec import Codec
from shardscope.training.compression.packed import Packed
from shardscope.training.compression.route import VARIABLE

LENGTHS = (0, 1, 2, 7, 8, 9, 255, 256, 257, 1000)
GUARD = 77
needs_numba = pytest.mark.skipif(importlib.util.find_spec("numba") is None, reason="numba is not installed")
ROUTES = ["torch", pytest.param("numba", marks=needs_numba)]
QUICKER = "torch" if importlib.util.find_spec("numba") is None else "numba"
"""For what takes many rounds; that both routes give the same bytes is a test of its own."""

finite = st.floats(-(2.0**99), 2.0**99, width=32)
any_values = arrays.arrays("float32", st.integers(0, 70), elements=finite).map(torch.from_numpy)


def codec_of(compression: ss.Compression, route: str) -> Codec:
    """The method's codec, built for one of the two routes."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(VARIABLE, route)
        compressor = compression.build(job_of(compression, 2))
    assert isinstance(compressor, Packed)
    return compressor.codec


def random_values(count: int, seed: int = 0) -> torch.Tensor:
    """Normal, with magnitudes that differ by orders, and some zeros of both signs."""
    generator = torch.Generator().manual_seed(seed + count)
    values = torch.randn(count, generator=generator) * torch.randn(count, generator=generator).mul(2).exp()
    values[::11] = 0.0
    values[5::22] = -0.0
    return values


def packed(codec: Codec, values: torch.Tensor, seed: int = 5) -> torch.Tensor:
    """A packet of `values`; what lies behind it is left alone."""
    size = codec.num_bytes(values.numel())
    room = torch.full((-(-size // 8) * 8 + 8,), GUARD, dtype=torch.uint8)
    codec.encode(values, room[:size], seed)
    assert (room[size:] == GUARD).all()
    return room[:size]


def back(codec: Codec, packet: torch.Tensor, count: int, seed: int = 5) -> torch.Tensor:
    """What comes out of a packet; what lies around it is left alone."""
    room = torch.full((count + 2,), float(GUARD))
    codec.decode(packet, room[1:-1], seed)
    assert room[0] == room[-1] == GUARD
    return room[1:-1]


def round_trip(codec: Codec, values: torch.Tensor, seed: int = 5) -> torch.Tensor:
    """There and back."""
    return back(codec, packed(codec, values, seed), values.numel(), seed)


def largest_by_chance(variances: torch.Tensor) -> torch.Tensor:
    """What the sum of squares of normal numbers of mean zero exceeds once in some 30,000 times.

    It is spread like a chi-square of as many degrees of freedom as numbers share the variance (Satterthwaite 1946): of
    512 alike it is 1.27 times its mean, of a single one 19 times. The quantile is that of Wilson and Hilferty (1931).
    """
    total = variances.sum()
    ninths = 2 / 9 * variances.square().sum() / total.square()
    return total * (1 - ninths + 4 * ninths.sqrt()) ** 3


class CodecConformance:
    """Subclass it as ``Test...`` and set `methods`."""

    methods: ClassVar[list[ss.Compression]]
    without_zero: ClassVar[set[str]] = set()
    """Methods that cannot say zero."""

    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        if "compression" in metafunc.fixturenames:
            metafunc.parametrize("compression", self.methods, ids=[m.label for m in self.methods])
        if "route" in metafunc.fixturenames:
            metafunc.parametrize("route", ROUTES)

    def test_packets_are_as_long_as_the_formula_says_and_hold_the_values(
        self, compression: ss.Compression, route: str
    ) -> None:
        codec = codec_of(compression, route)
        for count in LENGTHS:
            values = random_values(count)
            assert codec.num_bytes(count) == compression.packet_bytes(count)
            assert torch.isfinite(round_trip(codec, values)).all()

    def test_zeros_come_back_as_zeros(self, compression: ss.Compression, route: str) -> None:
        codec = codec_of(compression, route)
        for count in LENGTHS:
            came = round_trip(codec, torch.zeros(count))
            if compression.name in self.without_zero:
                assert (came.abs() == 1).all()
            else:
                assert not came.any()

    def test_the_largest_floats_come_back_finite(self, compression: ss.Compression, route: str) -> None:
        codec = codec_of(compression, route)
        if codec.may_overflow:
            pytest.skip(f"{compression.name} refuses what it has made infinite")
        for largest in (torch.finfo(torch.float32).max, 3e38, 3e37, 1e36):
            for count in (1, 9, 256, 1000):
                values = random_values(count).clamp_(-1.0, 1.0) * largest
                came = round_trip(codec, values)
                assert came.isfinite().all()
                assert torch.equal(packed(codec_of(compression, "torch"), values), packed(codec, values))

    def test_unpacking_adds_and_subtracts_what_it_sets(self, compression: ss.Compression, route: str) -> None:
        codec = codec_of(compression, route)
        for count in LENGTHS:
            values, there = random_values(count), random_values(count, seed=1)
            packet = packed(codec, values)
            came = back(codec, packet, count)
            more, less = there.clone(), values.clone()
            codec.decode(packet, more, 5, add=True)
            codec.subtract(packet, less, 5)
            assert torch.equal(more, there + came)
            assert torch.equal(less, values - came)

    def test_the_seed_decides(self, compression: ss.Compression, route: str) -> None:
        codec, values = codec_of(compression, route), random_values(1000)
        assert torch.equal(packed(codec, values, 3), packed(codec, values, 3))
        if codec.unbiased:
            assert not torch.equal(packed(codec, values, 3), packed(codec, values, 4))

    def test_the_mean_over_seeds_is_right_where_claimed(self, compression: ss.Compression) -> None:
        codec, values, rounds = codec_of(compression, QUICKER), random_values(512), 1000
        if not codec.unbiased:
            pytest.skip(f"{compression.name} does not claim it")
        came = torch.stack([round_trip(codec, values, seed) for seed in range(rounds)]).double()
        error = (came.mean(dim=0) - values).square().sum()
        bound = largest_by_chance(came.var(dim=0) / rounds)
        assert error < bound, (
            f"the mean of {rounds} packets is off by {error.sqrt():.4g}, and chance explains {bound.sqrt():.4g}"
        )

    def test_it_contracts_as_claimed(self, compression: ss.Compression) -> None:
        codec = codec_of(compression, QUICKER)

        @settings(max_examples=25, deadline=None)
        @given(values=any_values)
        def check(values: torch.Tensor) -> None:
            delta = codec.contraction(values.numel())
            if delta is None or 0 < float(values.abs().max() if len(values) else 0.0) < 1e-15:
                return  # squares that float32 has no numbers for
            seeds, slack = (range(100), 1.4) if codec.unbiased else (range(1), 1 + 1e-5)
            errors = [(round_trip(codec, values, s) - values).double().square().sum() for s in seeds]
            error, square = sum(errors) / len(errors), values.double().square().sum()
            assert error <= slack * (1 - delta) * square, (
                f"packets of {len(values)} values leave out {error / square:.4g} of their square in the mean, and "
                f"contraction({len(values)}) = {delta:.4g} allows {1 - delta:.4g} (with slack {slack:g} times that)"
            )

        check()

    @needs_numba
    def test_both_routes_give_the_same_bytes(self, compression: ss.Compression) -> None:
        plain, compiled = codec_of(compression, "torch"), codec_of(compression, "numba")

        def check(values: torch.Tensor) -> None:
            packet = packed(plain, values)
            assert torch.equal(packed(compiled, values), packet)
            outcomes = [back(codec, packet, values.numel()) for codec in (plain, compiled)]
            assert torch.equal(*outcomes)

        settings(max_examples=50, deadline=None)(given(any_values)(check))()
        for count in (*LENGTHS, 70_001):
            check(random_values(count))

    @needs_numba
    def test_threads_change_nothing(self, compression: ss.Compression) -> None:
        codec, values, before = (
            codec_of(compression, "numba"),
            random_values(300_003),
            torch.get_num_threads(),
        )
        outcomes = []
        for threads in (1, 3):
            torch.set_num_threads(threads)
            packet = packed(codec, values)
            outcomes.append((packet, back(codec, packet, values.numel())))
        torch.set_num_threads(before)
        assert torch.equal(outcomes[0][0], outcomes[1][0])
        assert torch.equal(outcomes[0][1], outcomes[1][1])
