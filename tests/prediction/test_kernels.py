"""Which kernels run: softmax in one or in pieces, attention by software, and collectives on two links at once."""

from __future__ import annotations

import numpy as np
import pytest

from shardscope.analytic.compute.work import SEPARATE_BYTES
from shardscope.analytic.layouts import Layouts
from shardscope.prediction.step import step_time
from shardscope.prediction.step.machine import Machine
from shardscope.prediction.step.tables import WeightTimes, weights
from shardscope.spec.attention_kernels import KERNELS
from shardscope.spec.calibration import Calibration
from shardscope.spec.cluster import Cluster, Device
from shardscope.spec.effects import usual
from shardscope.spec.layout import Layout
from shardscope.spec.model import Transformer
from shardscope.spec.software import SOFTWARE, Software

MODEL = Transformer(layers=24, hidden=2048, heads=16, vocab=51200, seq=1024)
CLUSTER = Cluster.of("a100-80gb", nodes=64)
KNOWN = Calibration.of("a100-megatron").replace(half_size=0.0, launch_s=0.0, shapes={})


def compute_s(software: str, micro_batch: int, **changes: object) -> float:
    layout = Layout(
        tensor=8, micro_batch=micro_batch, global_batch=4, flash_attention=False, precision="fp16-mixed"
    ).replace(**changes)
    parts = step_time(MODEL, Layouts.of([layout]), CLUSTER, KNOWN.replace(software=software))
    return float(parts.compute[0])


def test_softmax_is_in_pieces_where_heads_and_sequences_are_no_multiple_of_four() -> None:
    rate = Machine.of(CLUSTER, KNOWN, "fp16-mixed").memory_rate
    scores = 4 * MODEL.seq**2 * MODEL.heads / 8
    more = 2 * MODEL.layers * SEPARATE_BYTES[2] * scores / rate
    assert compute_s("megatron-core", 1) - compute_s("megatron-core", 2) == pytest.approx(more)
    assert compute_s("fsdp2", 2) - compute_s("megatron-core", 2) == pytest.approx(more)
    assert compute_s("fsdp2", 1, flash_attention=True) == compute_s("megatron-core", 1, flash_attention=True)


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


@pytest.mark.parametrize("software", SOFTWARE.values(), ids=lambda each: each.name)
def test_attention_is_expected_at_the_published_speed_of_the_softwares_kernel(software: Software) -> None:
    found = usual(software, Device.of("h100-80gb"))
    assert found.attention_efficiency == KERNELS[software.attention]["h100"]
    assert usual(software, Device.of("mi300x")).attention_efficiency == 0.4
