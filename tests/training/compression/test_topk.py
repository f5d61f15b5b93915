"""Top-k's codec by itself: what it selects, how narrow its indices are, and the same bytes from both routes."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from hypothesis import given, settings

import shardscope as ss
from shardscope.analytic.communication.compressed import index_bytes, kept_elements
from shardscope.methods.compressors.randomk._torch import RandomKCodec
from shardscope.methods.compressors.topk import _torch_select as topk_select
from shardscope.methods.compressors.topk._torch import TopKCodec
from shardscope.methods.compressors.topk._torch_loops import compiled_loops
from shardscope.training.compression.codec import Codec

RATIOS = (0.001, 0.01, 0.1, 0.24, 0.3, 0.5, 0.99, 1.0)
LENGTHS = (1, 2, 3, 7, 64, 257, 1000, 4099)


def _outlier(count: int) -> torch.Tensor:
    values = torch.randn(count) * 1e-3
    values[count // 2] = -1e30
    return values


KINDS: dict[str, Callable[[int], torch.Tensor]] = {
    "normal": torch.randn,
    "equal": lambda count: torch.where(torch.arange(count) % 3 == 0, 2.5, -2.5),
    "zeros": torch.zeros,
    "mostly zeros": lambda count: torch.where(torch.arange(count) % 7 == 0, torch.randn(count), 0.0),
    "outlier": _outlier,
    "tiny": lambda count: torch.randn(count) * 1e-42,
}


def packed(codec: Codec, values: torch.Tensor, seed: int = 1) -> torch.Tensor:
    size = codec.num_bytes(values.numel())
    packet = torch.full((-(-size // 8) * 8,), 255, dtype=torch.uint8)[:size]
    codec.encode(values, packet, seed)
    return packet


def back(codec: Codec, packet: torch.Tensor, count: int, seed: int = 1) -> torch.Tensor:
    out = torch.full((count,), 7.0)
    codec.decode(packet, out, seed)
    return out


def by_sorting(values: torch.Tensor, count: int) -> torch.Tensor:
    """The `count` largest by Python's own stable sort: of equal ones the first."""
    order = sorted(range(values.numel()), key=lambda i: -abs(float(values[i])))[:count]
    out = torch.zeros_like(values)
    out[order] = values[order]
    return out


@given(
    kind=st.sampled_from(sorted(KINDS)),
    count=st.one_of(st.sampled_from(LENGTHS), st.integers(1, 300)),
    ratio=st.one_of(st.sampled_from(RATIOS), st.floats(1e-4, 1.0)),
    seed=st.integers(0, 2**31),
)
@settings(max_examples=120, deadline=None)
def test_the_largest_come_back_as_they_were_and_nothing_else(
    kind: str, count: int, ratio: float, seed: int
) -> None:
    torch.manual_seed(seed)
    values = KINDS[kind](count)
    for selection in ("sampled", "exact"):
        codec = TopKCodec(ratio, selection)
        packet = packed(codec, values, seed)
        assert packet.numel() == ss.Compression("topk", ratio=ratio).packet_bytes(count)
        got = back(codec, packet, count, seed)
        assert torch.equal(got, by_sorting(values, int(kept_elements(count, ratio))))
        left, all_ = (values - got).double().square().sum(), values.double().square().sum()
        contraction = codec.contraction(count)
        assert contraction is not None
        assert left <= (1 - contraction) * all_ * (1 + 1e-12)


@pytest.mark.parametrize("codec", [TopKCodec(0.1, "exact"), TopKCodec(0.1, "sampled"), RandomKCodec(0.1)])
def test_of_nothing_nothing_is_sent(codec: Codec) -> None:
    empty = torch.zeros(0)
    packet = packed(codec, empty, 1)
    assert packet.numel() == 0
    assert back(codec, packet, 0, 1).numel() == 0


@pytest.mark.parametrize("kind", KINDS)
def test_the_packets_of_the_compiled_loops_are_those_of_plain_torch(kind: str) -> None:
    compiled, plain = TopKCodec(0.1), TopKCodec(0.1)
    compiled.loops, plain.loops = compiled_loops(), None
    for count, ratio in itertools.product(LENGTHS, RATIOS):
        compiled.ratio = plain.ratio = ratio
        values = KINDS[kind](count)
        packet = packed(compiled, values)
        assert torch.equal(packet, packed(plain, values))
        assert torch.equal(back(compiled, packet, count), back(plain, packet, count))


@pytest.mark.parametrize("loops", [compiled_loops(), None], ids=["numba", "torch"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("ratio", [0.0003, 0.01, 0.2, 0.6])
def test_a_sample_finds_what_sorting_all_finds(
    kind: str, ratio: float, loops: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(topk_select, "SAMPLE", 1 << 10)
    torch.manual_seed(3)
    values = KINDS[kind](20_011)
    count = int(kept_elements(values.numel(), ratio))
    for seed in range(5):
        found = topk_select.largest_by_sample(values, count, seed, loops)  # type: ignore[arg-type]
        expected = topk_select.largest(values, count, None)
        assert torch.equal(found.indices, expected.indices)
        assert torch.equal(found.values, expected.values)
        assert found.indices.numel() == count


@pytest.mark.parametrize("loops", [compiled_loops(), None], ids=["numba", "torch"])
def test_a_sample_that_misleads_changes_nothing(loops: object, monkeypatch: pytest.MonkeyPatch) -> None:
    """Places that all lie among the largest, or all among the smallest."""
    monkeypatch.setattr(topk_select, "SAMPLE", 1 << 10)
    values = torch.linspace(-1.0, 1.0, 20_011)
    by_size = values.abs().argsort()
    for places in (by_size[-1024:], by_size[:1024]):
        monkeypatch.setattr(topk_select, "draw", lambda *_, places=places: places)
        found = topk_select.largest_by_sample(values, 200, 0, loops)  # type: ignore[arg-type]
        assert torch.equal(found.indices, topk_select.largest(values, 200, None).indices)


@given(count=st.integers(1, 3000), data=st.data())
@settings(max_examples=80, deadline=None)
def test_indices_are_never_wider_than_a_bitmap_nor_narrower_than_possible(
    count: int, data: st.DataObject
) -> None:
    kept = data.draw(st.integers(1, count))
    bits = 8 * int(index_bytes(count, kept))
    assert bits <= 8 * -(-count // 8)
    assert bits >= math.log2(math.comb(count, kept)) - 1e-6
    if 10 * kept <= count:
        assert bits <= math.log2(math.comb(count, kept)) + 0.65 * kept + 32


def test_an_index_takes_8_56_bits_of_25_million_at_1_percent() -> None:
    count, kept = 25_000_000, 250_000
    assert 8 * int(index_bytes(count, kept)) / kept == pytest.approx(8.5625, abs=1e-4)


def test_bytes_take_arrays() -> None:
    counts, kept = np.array([10, 1000, 5000]), np.array([[1], [10]])
    table = index_bytes(counts, kept)
    assert table.shape == (2, 3)
    assert [[int(index_bytes(n, k)) for n in counts] for k in kept[:, 0]] == table.tolist()
