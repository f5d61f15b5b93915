"""Codecs that give each element fewer bits: what each family claims, in one process and on real ranks."""

from __future__ import annotations

import math
from pathlib import Path
from typing import ClassVar

import numpy as np
import pytest
import torch

import shardscope as ss
from conformance.codec import ROUTES, CodecConformance, codec_of, packed, random_values, round_trip
from conformance.compressor import (
    CompressorConformance,
    bucket_of,
    carrier_of,
    exchange,
    gradients,
    make,
)
from conformance.ranks import RankPool
from shardscope.methods.compressors.sign._torch import MajorityVote
from shardscope.training.compression import NotFinite
from shardscope.training.compression.bits import pack_bits, packed_size, unpack_bits
from shardscope.training.compression.noise import draw, keys_of
from shardscope.training.compression.route import VARIABLE
from shardscope.training.context import RankContext


class TestCodecs(CodecConformance):
    methods: ClassVar = [
        ss.Compression("fp8"),
        ss.Compression("fp8", block=24),
        ss.Compression("int8"),
        ss.Compression("int4", block=24),
        ss.Compression("qsgd", block=64),
        *(ss.Compression("qsgd", bits=bits, block=8) for bits in (2, 3, 4, 5, 6, 7)),
        ss.Compression("terngrad"),
        ss.Compression("natural"),
        ss.Compression("sign"),
        ss.Compression("sign", block=24),
        ss.Compression("sign-vote"),
    ]
    without_zero: ClassVar = {"sign-vote"}


class TestOnRanks(CompressorConformance):
    methods: ClassVar = [
        ss.Compression("fp8"),
        ss.Compression("qsgd"),
        ss.Compression("qsgd", bits=3, exchange="gather"),
        ss.Compression("terngrad"),
        ss.Compression("natural", exchange="gather"),
        ss.Compression("sign"),
        ss.Compression("sign", feedback=False, exchange="gather", block=64),
        ss.Compression("sign-vote"),
    ]
    near: ClassVar = {"fp8": 0.05, "natural": 0.4}

    def test_zeros_stay_zeros(self, compression: ss.Compression, pool: RankPool, tmp_path: Path) -> None:
        if compression.name == "sign-vote":
            pytest.skip("its one bit says + or - and cannot say zero")
        super().test_zeros_stay_zeros(compression, pool, tmp_path)


@pytest.mark.parametrize("bits", range(1, 9))
def test_codes_lie_bit_by_bit_in_the_packed_stream(bits: int) -> None:
    for count in (0, 1, 7, 8, 9, 41):
        codes = torch.randint(
            2**bits, (count,), dtype=torch.uint8, generator=torch.Generator().manual_seed(1)
        )
        stream = torch.empty(packed_size(count, bits), dtype=torch.uint8)
        pack_bits(codes, bits, stream)
        whole = int.from_bytes(bytes(stream.tolist()), "little")
        assert [(whole >> (k * bits)) % 2**bits for k in range(count)] == codes.tolist()
        assert torch.equal(unpack_bits(stream, bits, count), codes)


def test_random_numbers_are_spread_evenly_and_independent_of_their_neighbours() -> None:
    count, first = 1 << 16, draw(keys_of(1), 0, 1 << 16, 16)
    assert torch.equal(draw(keys_of(1), 1000, 24, 16), first[1000:1024])
    chi_square = ((torch.bincount(first >> 8) - count / 256) ** 2 / (count / 256)).sum()
    assert 180 < float(chi_square) < 340  # 255 degrees of freedom: four standard deviations
    centred = first.double() / 2**16 - 0.5
    others = [centred.roll(1), centred.roll(8), draw(keys_of(2), 0, count, 16).double() / 2**16 - 0.5]
    for other in others:
        assert abs(float((centred * other).mean()) * 12) < 4 / math.sqrt(count)


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("name", ["int8", "int4"])
def test_integers_are_the_nearest_of_their_block(name: str, route: str) -> None:
    values = random_values(1000)
    came = round_trip(codec_of(ss.Compression(name, block=40), route), values).double().view(-1, 40)
    rows, largest = values.double().view(-1, 40), 127 if name == "int8" else 7
    step = rows.abs().amax(dim=1, keepdim=True) / largest
    assert ((came / step - (came / step).round()).abs() < 1e-4).all()
    assert ((came - rows).abs() <= 0.5001 * step).all()
    assert torch.allclose(came.abs().amax(dim=1), rows.abs().amax(dim=1))


@pytest.mark.parametrize("route", ROUTES)
def test_what_a_format_can_say_comes_back_exactly(route: str) -> None:
    eights = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    eights = eights[eights.isfinite()]
    assert torch.equal(round_trip(codec_of(ss.Compression("fp8"), route), eights), eights)
    levels = torch.cat([torch.arange(-127.0, 128.0), torch.zeros(1)])
    assert torch.equal(round_trip(codec_of(ss.Compression("int8"), route), levels), levels)
    assert torch.equal(round_trip(codec_of(ss.Compression("qsgd"), route), levels), levels)
    powers = torch.tensor([2.0**k for k in range(-126, 128)])
    powers = torch.cat([powers, -powers, torch.zeros(3)])
    assert torch.equal(round_trip(codec_of(ss.Compression("natural"), route), powers), powers)
    ternary = torch.tensor([1.0, -1.0, 1.0, 0.0, -1.0]).repeat(9) * 0.25
    assert torch.equal(round_trip(codec_of(ss.Compression("terngrad"), route), ternary), ternary)


@pytest.mark.parametrize("route", ROUTES)
def test_ternary_values_are_right_in_the_mean_once_clipped(route: str) -> None:
    values, rounds = random_values(512), 400
    codec = codec_of(ss.Compression("terngrad", clip=1.5), route)
    cut = 1.5 * float(values.double().square().mean().sqrt())
    assert float(values.abs().max()) > cut
    came = torch.stack([round_trip(codec, values, seed) for seed in range(rounds)])
    assert set((came / came.abs().max()).unique().tolist()) == {-1.0, 0.0, 1.0}
    error = (came.mean(dim=0) - values.clamp(-cut, cut)).norm()
    assert float(error) < 1.3 * float((came.var(dim=0).sum() / rounds).sqrt())


@pytest.mark.parametrize("route", ROUTES)
def test_signs_are_bits_behind_the_mean_magnitude_of_each_block(route: str) -> None:
    values = random_values(1000, seed=2) + 1e-3
    packet = packed(codec_of(ss.Compression("sign", block=64), route), values)
    scales = np.frombuffer(packet[: 4 * 16].numpy().tobytes(), np.float32)
    means = [values[i : i + 64].abs().double().mean().item() for i in range(0, 1000, 64)]
    assert np.allclose(scales, means, rtol=1e-6)
    bits = np.packbits(values.numpy() < 0, bitorder="little")
    assert packet[64:].tolist() == bits.tolist()


def test_votes_are_counted_and_ties_go_both_ways(pool: RankPool, tmp_path: Path) -> None:
    compression = ss.Compression("sign-vote")

    def body(context: RankContext) -> torch.Tensor:
        return exchange(make(compression, context), context, gradients(context.rank))

    came = pool.run(body, tmp_path)[0]
    votes = sum(gradients(rank).sign() for rank in range(pool.world_size))
    assert torch.equal(came[votes != 0], votes[votes != 0].sign())
    ties = came[votes == 0]
    assert (ties.abs() == 1).all()
    if pool.world_size % 2 == 0:
        assert abs(float(ties.mean())) < 0.2


def test_a_share_of_the_votes_is_a_vote_as_well(pool: RankPool, tmp_path: Path) -> None:
    compression = ss.Compression("sign-vote")

    def body(context: RankContext) -> torch.Tensor:
        flat = gradients(context.rank, shapes=[(12 * 30,)])
        out = torch.empty(flat.numel() // context.world_size)
        bucket = bucket_of(flat, shapes=[(12 * 30,)])
        make(compression, context).scatter_mean(bucket, carrier_of(context), out)
        return out

    whole = torch.cat(pool.run(body, tmp_path))
    votes = sum(gradients(rank, shapes=[(12 * 30,)]).sign() for rank in range(pool.world_size))
    assert torch.equal(whole[votes != 0], votes[votes != 0].sign())
    assert (whole.abs() == 1).all()


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("largest", [torch.finfo(torch.float32).max, 1e36])
def test_the_mean_magnitude_of_a_block_is_right_also_where_its_sum_is_infinite(
    largest: float, route: str
) -> None:
    values = random_values(700).clamp_(-1.0, 1.0) * largest
    packet = packed(codec_of(ss.Compression("sign"), route), values)  # one block, not full
    mean = np.frombuffer(packet[:4].numpy().tobytes(), np.float32)[0]
    assert mean == pytest.approx(float(values.abs().double().mean()), rel=1e-6)
    every = packed(codec_of(ss.Compression("sign"), route), torch.full((700,), -largest))
    assert np.frombuffer(every[:4].numpy().tobytes(), np.float32)[0] == np.float32(largest)


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("step", [3, 4])
def test_ties_alternate_from_element_to_element_and_step_to_step(
    step: int, route: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(VARIABLE, route)
    counted = random_values(70_003).sign()
    counted[65_530:65_545] = 0.0  # where plain torch goes on with its next piece
    votes = counted.clone()
    MajorityVote("sign-vote").conclude_(votes, step)
    tie = (-1.0) ** (torch.arange(votes.numel()) + step)
    assert torch.equal(votes, torch.where(counted == 0, tie, counted))


@pytest.mark.ranks(2)  # what a rank refuses has no others in it
def test_a_double_that_float32_has_no_number_for_is_refused_by_name(pool: RankPool, tmp_path: Path) -> None:
    """Also where a sum would hide it. What packs as it is, in float64, takes it."""
    methods = ("int8", "sign", "topk", "bf16", "powersgd", "adaptive-bits", "local-sgd")

    def body(context: RankContext) -> dict[str, str]:
        said = {}
        for name in methods:
            flat = gradients(context.rank).double()
            flat[33 * 17 + 2], flat[33 * 17 + 3] = 1e300, -1e300  # in the second tensor
            try:
                exchange(make(ss.Compression(name), context), context, flat)
            except NotFinite as error:
                said[name] = str(error)
        return said

    for said in pool.run(body, tmp_path):
        assert list(said) == list(methods[:-1])
        assert all("'p1' is beyond the range of float32 at step 1" in message for message in said.values())
