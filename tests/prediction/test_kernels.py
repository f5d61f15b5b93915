"""Which kernels run: softmax in one or in pieces, attention by software, and collectives on two links at once."""

from __future__ import annotations

import numpy as np
import pytest

from shardscope.analytic.compute.work import SEPARATE_BYTES
from shardscope.analytic.layouts import Layouts
from shardscope.calibration.calibration import Calibration
from shardscope.calibration.effects import usual
from shardscope.calibration.software import SOFTWARE
from shardscope.prediction.step import step_time
from shardscope.prediction.step.machine import Machine
from shardscope.prediction.step.tables import WeightTimes, weights
from shardscope.spec.cluster import Cluster, Device
from shardscope.spec.layout import Layout
from shardscope.spec.model import Transformer

MODEL = Transformer(layers=24, hidden=2048, heads=16, vocab=51200, seq=1024)
CLUSTER = Cluster.of("a100-80gb", nodes=64)
KNOWN = Calibration.of("a100-megatron").replace(half_size=0.0, launch_s=0.0, shapes={})


def compute_s(software: str, micro_batch: int, seq: int = MODEL.seq, **changes: object) -> float:
    layout = Layout(
        tensor=8, micro_batch=micro_batch, global_batch=4, flash_attention=False, precision="fp16-mixed"
    ).replace(**changes)
    model = MODEL.replace(seq=seq)
    parts = step_time(model, Layouts.of([layout]), CLUSTER, KNOWN.replace(software=software))
    return float(parts.compute[0])


def test_softmax_is_in_pieces_where_heads_times_sequences_is_not_a_multiple_of_four() -> None:
    rate = Machine.of(CLUSTER, KNOWN, "fp16-mixed").memory_rate
    scores = 4 * MODEL.seq**2 * MODEL.heads / 8
    more = 2 * MODEL.layers * SEPARATE_BYTES[2] * scores / rate
    assert compute_s("megatron-core", 1) - compute_s("megatron-core", 2) == pytest.approx(more)
    assert compute_s("fsdp2", 2) - compute_s("megatron-core", 2) == pytest.approx(more)
    assert compute_s("fsdp2", 1, flash_attention=True) == compute_s("megatron-core", 1, flash_attention=True)


@pytest.mark.parametrize(
    ("seq", "in_one"), [(16, False), (20, True), (1022, False), (4096, True), (4100, False), (8192, False)]
)
def test_softmax_is_in_pieces_where_sequences_are_longer_than_the_kernel_takes(
    seq: int, in_one: bool
) -> None:
    rate = Machine.of(CLUSTER, KNOWN, "fp16-mixed").memory_rate
    more = 2 * MODEL.layers * SEPARATE_BYTES[2] * 4 * seq**2 * MODEL.heads / 8 / rate
    saved = compute_s("fsdp2", 2, seq) - compute_s("megatron-core", 2, seq)
    assert saved == pytest.approx(more if in_one else 0.0, abs=1e-9 * more)


def states(cluster: Cluster, shard: int) -> WeightTimes:
    one, machine = np.ones(1), Machine.of(cluster, KNOWN, "bf16-mixed")
    return weights(
        MODEL, machine, tensor=one, pipeline=one, context=one, expert=one, data=64 * one, shard=shard * one,
        zero=3 * one, compression=np.zeros(1, np.int64), compressions=(Layout().compression,), precision="bf16-mixed",
        kept=Layout().optimizer.states,
    )  # fmt: skip


def backward_s(cluster: Cluster, shard: int) -> float:
    found = states(cluster, shard)
    return float((found.gather_s + found.reduce_s)[0])


def test_replicas_of_shards_are_reduced_while_the_shards_use_the_nodes_links() -> None:
    faster = CLUSTER.replace(intra=CLUSTER.intra.replace(bandwidth=2 * CLUSTER.intra.bandwidth))
    slow, fast = (CLUSTER.inter.replace(bandwidth=CLUSTER.inter.bandwidth * by) for by in (1 / 50, 50))
    assert backward_s(faster.replace(inter=fast), 8) < 0.9 * backward_s(CLUSTER.replace(inter=fast), 8)
    limited = backward_s(CLUSTER.replace(inter=slow), 8)
    assert limited == pytest.approx(backward_s(faster.replace(inter=slow), 8))


@pytest.mark.parametrize(
    ("software", "tflops"),
    [
        ("megatron-core", 539),
        ("nemo", 539),
        ("torchtitan", 335),
        ("fsdp2-2.10", 335),
        ("deepspeed", 335),
        ("llm-foundry", 335 / 2),
    ],
)
def test_attention_is_expected_just_below_the_published_forward_speed_of_its_kernel_on_hopper(
    software: str, tflops: float
) -> None:
    found = usual(SOFTWARE[software], Device.of("h100-80gb")).attention_efficiency
    assert 0.95 * tflops <= found * 989 <= 1.01 * tflops
    assert usual(SOFTWARE[software], Device.of("mi300x")).attention_efficiency == 0.4
