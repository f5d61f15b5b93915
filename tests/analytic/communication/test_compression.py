"""Compressed gradients: sizes against tensors really packed, times against sums by hand, and when they pay."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from shardscope.analytic import communication as comm
from shardscope.errors import SpecError
from shardscope.methods.compressors.topk._torch import TopKCodec
from shardscope.spec.compression import Compression, compression_names

WRITTEN_OUT = ("none", "fp16", "int8", "int4", "topk", "powersgd")
"""Those whose packets are made by hand below."""
LOSSY = compression_names()[1:]


def largest_in_a_packet(gradient: np.ndarray, ratio: float) -> np.ndarray:
    """By the codec of jobs, which gives back what it was given."""
    codec, values = TopKCodec(ratio, "exact"), torch.from_numpy(gradient.ravel())
    packet, back = torch.zeros(codec.num_bytes(len(values)), dtype=torch.uint8), torch.empty_like(values)
    codec.encode(values, packet, 0)
    codec.decode(packet, back, 0)
    kept = values.abs().argsort()[-len(values) // 100 :]
    assert torch.equal(back[kept], values[kept])
    return packet.numpy()


def really_packed(method: str, gradient: np.ndarray) -> list[np.ndarray]:
    """What a worker would send, as arrays."""
    flat = gradient.reshape(-1, 256)
    scales = np.abs(flat).max(axis=1).astype(np.float32)
    match method:
        case "none":
            return [gradient]
        case "fp16":
            return [gradient.astype(np.float16)]
        case "int8":
            return [np.round(flat / scales[:, None] * 127).astype(np.int8), scales]
        case "int4":
            levels = np.round(flat / scales[:, None] * 7).astype(np.int8).reshape(-1, 2) + 8
            return [(levels[:, 0] << 4 | levels[:, 1]).astype(np.uint8), scales]
        case "topk":
            return [largest_in_a_packet(gradient, 0.01)]
    p = gradient @ np.ones((gradient.shape[1], 4), dtype=np.float32)
    return [p, gradient.T @ p]


@pytest.mark.sampled
@pytest.mark.parametrize("method", WRITTEN_OUT)
def test_a_packed_gradient_weighs_what_it_weighs(method: str) -> None:
    gradient = np.random.default_rng(0).standard_normal((1600, 1600), dtype=np.float32)
    weight = sum(array.nbytes for array in really_packed(method, gradient))
    assert comm.packed_bytes(method, gradient.size, matrix_rows=1600) == pytest.approx(weight, rel=1e-3)


@pytest.mark.parametrize("method", ["topk", Compression("int8", exchange="gather")])
def test_what_is_gathered_grows_with_the_workers(method: Compression | str) -> None:
    sent = comm.compression_cost(method, 1e8, [2, 4, 8], 1e10).sent_bytes
    assert sent == pytest.approx(comm.packed_bytes(method, 1e8) * np.array([1, 3, 7]))


@pytest.mark.parametrize(
    "method", ["fp16", "int8", "int4", "powersgd", "randomk", Compression("topk", exchange="two-phase")]
)
def test_what_is_summed_or_packed_twice_does_not(method: Compression | str) -> None:
    sent = comm.compression_cost(method, 1e8, [2, 4, 1024], 1e10).sent_bytes
    assert sent == pytest.approx(2 * comm.packed_bytes(method, 1e8) * np.array([1 / 2, 3 / 4, 1023 / 1024]))


def test_uncompressed_is_the_ring_and_needs_no_codec() -> None:
    cost = comm.compression_cost("none", 1e8, 8, 1e10, latency=5e-6, codec_bandwidth=1.0)
    ring = comm.collective_time(
        op="all_reduce", algorithm="ring", num_bytes=4e8, workers=8, bandwidth=1e10, latency=5e-6
    )
    assert cost.codec_s == 0
    assert cost.total_s == pytest.approx(ring)


@pytest.mark.parametrize("method", compression_names())
def test_one_worker_packs_nothing(method: str) -> None:
    assert comm.compression_cost(method, 1e8, 1, 1e10, latency=1, codec_bandwidth=1.0).total_s == 0


@pytest.mark.parametrize("rank", [1, 4, 32])
def test_factors_weigh_two_ranks_of_rows_and_no_more_than_the_matrix(rank: int) -> None:
    method = Compression("powersgd", rank=rank)
    for rows, element_bytes in ((4096, 4), (1000, 4), (100, 2), (10, 4), (3, 2)):
        packed = comm.packed_bytes(method, 1e6, matrix_rows=rows, element_bytes=element_bytes)
        assert packed == pytest.approx(1e6 * min(4 * 2 * rank / rows, element_bytes))


def test_error_feedback_reads_and_writes_the_gradient_once_more() -> None:
    plain, kept = (
        comm.compression_cost(
            Compression("int8", feedback=feedback), 1e8, 1024, np.inf, codec_bandwidth=1e9
        ).codec_s
        for feedback in (False, True)
    )
    assert kept - plain == pytest.approx(2 * 4e8 * (1 + 1 / 1024) / 1e9)


def test_unknown_methods_and_a_bandwidth_of_zero_are_refused() -> None:
    with pytest.raises(SpecError, match="compression='zip' is not known"):
        comm.packed_bytes("zip", 1)
    with pytest.raises(SpecError, match="codec_bandwidth=0 is out of range"):
        comm.compression_cost("int8", 1, 2, 1e9, codec_bandwidth=0)
