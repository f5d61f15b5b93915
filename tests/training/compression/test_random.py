"""Random-k and random-block by themselves: fair draws without repetition, unbiased or contracting as claimed."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings

import shardscope as ss
from conformance.compressor import exchange, gradients, make
from conformance.ranks import RankPool
from shardscope.methods.compressors.randomblock._torch import RandomBlockCodec, ScaledRandomBlockCodec
from shardscope.methods.compressors.randomk._torch import RandomKCodec, ScaledRandomKCodec
from shardscope.training.compression import NotFinite
from shardscope.training.compression.codec import Codec
from shardscope.training.compression.randomk_draw import draw
from shardscope.training.context import RankContext


def through(codec: Codec, values: torch.Tensor, seed: int) -> torch.Tensor:
    packet = torch.empty(codec.num_bytes(values.numel()), dtype=torch.uint8)
    codec.encode(values, packet, seed)
    out = torch.full_like(values, 7.0)
    codec.decode(packet, out, seed)
    return out


@given(count=st.integers(1, 2000), data=st.data(), seed=st.integers(0, 2**32))
@settings(max_examples=80, deadline=None)
def test_a_draw_repeats_nothing_and_stays_in_range(count: int, data: st.DataObject, seed: int) -> None:
    kept = data.draw(st.integers(1, count))
    places = draw(count, kept, seed)
    assert places.unique().numel() == kept
    assert 0 <= int(places.min()) <= int(places.max()) < count
    assert torch.equal(places, draw.__wrapped__(count, kept, seed))


@pytest.mark.sampled
@pytest.mark.parametrize(("count", "kept"), [(10, 3), (7, 5), (101, 10), (16, 16), (5, 1)])
def test_every_place_is_drawn_equally_often(count: int, kept: int) -> None:
    draws = 8_000
    hits = sum(
        torch.bincount(draw.__wrapped__(count, kept, seed), minlength=count).double() for seed in range(draws)
    )
    chance = kept / count
    worst = (hits / draws - chance).abs().max()
    assert float(worst) <= 5 * (chance * (1 - chance) / draws) ** 0.5 + 1e-12


def test_consecutive_seeds_draw_unlike() -> None:
    """Seeds of neighbouring shares differ by one."""
    shared = [
        len(set(draw(10_000, 1000, seed).tolist()) & set(draw(10_000, 1000, seed + 1).tolist()))
        for seed in range(50)
    ]
    assert sum(shared) / len(shared) == pytest.approx(100, abs=10)


CODECS = [
    (RandomKCodec(0.1), ss.Compression("randomk", ratio=0.1)),
    (RandomBlockCodec(0.1, 16), ss.Compression("randomblock", ratio=0.1, block=16)),
]


@pytest.mark.parametrize(("codec", "compression"), CODECS, ids=["randomk", "randomblock"])
@given(count=st.integers(1, 700), seed=st.integers(0, 2**32))
@settings(max_examples=25, deadline=None)
def test_what_is_drawn_comes_back_as_it_was(
    codec: Codec, compression: ss.Compression, count: int, seed: int
) -> None:
    values = torch.randn(count)
    got = through(codec, values, seed)
    assert codec.num_bytes(count) == compression.packet_bytes(count)
    assert torch.equal(got[got != 0], values[got != 0])
    assert 4 * int((got != 0).sum()) <= codec.num_bytes(count)
    assert torch.equal(got, through(codec, values, seed))


@pytest.mark.parametrize(
    "codec", [RandomKCodec(1.0), RandomBlockCodec(1.0, 16)], ids=["randomk", "randomblock"]
)
@pytest.mark.parametrize("count", [1, 2, 15, 16, 333])
def test_at_a_ratio_of_one_all_comes_back(codec: Codec, count: int) -> None:
    values = torch.randn(count)
    assert torch.equal(through(codec, values, 5), values)
    assert codec.num_bytes(count) == 4 * count


@pytest.mark.parametrize(
    "codec", [RandomKCodec(0.13), RandomBlockCodec(0.13, 8)], ids=["randomk", "randomblock"]
)
def test_what_is_left_out_has_the_share_of_the_squares_that_is_claimed(codec: Codec) -> None:
    values = torch.randn(201) * torch.linspace(0.1, 3.0, 201)
    left = torch.tensor(
        [float((values - through(codec, values, seed)).square().sum()) for seed in range(3000)]
    )
    delta = codec.contraction(201)
    assert delta is not None
    bound = (1 - delta) * float(values.square().sum())
    assert float(left.mean()) == pytest.approx(bound, abs=5 * float(left.std()) / 3000**0.5)


@pytest.mark.parametrize(
    "codec", [ScaledRandomKCodec(0.13), ScaledRandomBlockCodec(0.13, 8)], ids=["randomk", "randomblock"]
)
def test_without_feedback_the_mean_over_draws_is_the_gradient(codec: Codec) -> None:
    assert codec.unbiased
    values = torch.randn(201)
    draws = torch.stack([through(codec, values, seed) for seed in range(3000)])
    error = (draws.mean(0) - values).abs()
    assert bool((error <= 5 * draws.std(0) / 3000**0.5 + 1e-6).all())


@pytest.mark.ranks(2)
@pytest.mark.parametrize("name", ["randomk", "randomblock"])
def test_what_multiplying_makes_infinite_is_refused_by_name(
    name: str, pool: RankPool, tmp_path: Path
) -> None:
    """3e37 over a ratio of 1 % is beyond float32. With feedback nothing is multiplied, and it goes through."""

    def body(context: RankContext) -> list[Any]:
        said: list[Any] = []
        for feedback in (False, True):
            settings = {"block": 8} if name == "randomblock" else {}
            compressor = make(ss.Compression(name, ratio=0.01, feedback=feedback, **settings), context)
            flat = gradients(context.rank)
            flat[33 * 17 + 6 :] = 3e37  # from the third tensor on
            try:
                said.append(exchange(compressor, context, flat))
            except NotFinite as error:
                said.append(str(error))
        return said

    for refused, came in pool.run(body, tmp_path):
        assert re.search(rf"'p[234]' is beyond the range of compression='{name}' at step 1", refused)
        assert "feedback=True" in refused
        assert came.isfinite().all()
