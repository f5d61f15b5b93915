"""Layouts that cannot be are refused, in one sentence that says what would be right."""

from __future__ import annotations

from typing import Any

import pytest

from shardscope.errors import SpecError
from shardscope.spec.cluster import Cluster, Device, Link
from shardscope.spec.layout import Layout
from shardscope.spec.layout_rules import problems
from shardscope.spec.model import LayerTable, Mixture, Transformer
from shardscope.spec.pipeline_schedule import schedules

DENSE = Transformer(name="dense", layers=8, hidden=64, heads=8, kv_heads=4, vocab=100, seq=32)
SPARSE = DENSE.replace(name="sparse", mixture=Mixture(experts=4, active=2, ffn=64))
LINK = Link(name="wire", bandwidth=1e9, latency_s=1e-6, source="test")
CLUSTER = Cluster(
    name="two", nodes=1, per_node=2, intra=LINK, inter=LINK,
    device=Device(name="d", memory_bytes=1e9, peak_flops={"bf16": 1e12}, memory_bandwidth=1e11, source="test"),
)  # fmt: skip

BAD: list[tuple[dict[str, Any], Transformer, str]] = [
    ({"data": 2, "global_batch": 3}, DENSE, "not a multiple of data=2 x micro_batch=1 = 2; use for example 4"),
    ({"tensor": 16}, DENSE, "tensor=16 does not divide heads=8 of dense; use one of 1, 2, 4, 8"),
    ({"tensor": 3}, DENSE, "tensor=3 does not divide heads=8"),
    ({"pipeline": 16}, DENSE, "16 stages are more than the 8 layers of dense; use at most 8"),
    ({"context": 3, "data": 1}, DENSE, "context=3 does not divide seq=32"),
    ({"expert": 2, "data": 2, "global_batch": 2}, DENSE, "expert=2, but dense has no experts; use expert=1"),
    ({"expert": 3, "data": 3, "global_batch": 3}, SPARSE, "expert=3 does not divide mixture.experts=4"),
    ({"expert": 2}, SPARSE, "expert=2 does not divide data x context = 1; use one of 1"),
    ({"sequence_parallel": True}, DENSE, "sequence_parallel=True has no effect with tensor=1"),
    ({"shard": 2, "data": 4, "global_batch": 4}, DENSE, "shard=2 has no effect with zero=0"),
    ({"shard": 3, "zero": 1, "data": 4, "global_batch": 4}, DENSE, "shard=3 does not divide data x context = 4"),
    ({"virtual_stages": 2}, DENSE, "virtual_stages=2 has no effect with pipeline=1"),
    ({"virtual_stages": 2, "pipeline": 2}, DENSE, "but schedule='1f1b' needs 1 stages per rank; use 1"),
    ({"pipeline": 2, "schedule": "interleaved"}, DENSE, "schedule='interleaved' needs 2 or more stages per rank"),
    (
        {"pipeline": 2, "schedule": "interleaved", "virtual_stages": 2, "global_batch": 3}, DENSE,
        "num_micro_batches=3 is not a multiple of pipeline=2",
    ),
    (
        {"pipeline": 2, "schedule": "dualpipev", "virtual_stages": 2, "global_batch": 3}, DENSE,
        "num_micro_batches=3 is too few for schedule='dualpipev' with pipeline=2; use 4 or more",
    ),
    ({"compression": "int8"}, DENSE, "compression='int8' has no effect"),
]  # fmt: skip


@pytest.mark.parametrize(("fields", "model", "message"), BAD, ids=[message[:30] for _, _, message in BAD])
def test_a_layout_that_cannot_be_is_refused(fields: dict[str, Any], model: Transformer, message: str) -> None:
    with pytest.raises(SpecError) as refused:
        Layout(**fields).check(model)
    assert message in str(refused.value)
    assert "\n" not in str(refused.value)


def test_the_number_of_devices_must_be_the_clusters() -> None:
    Layout(data=2, global_batch=2).check(DENSE, CLUSTER)
    with pytest.raises(SpecError, match="needs 1 devices, but the cluster has 2; make the product 2"):
        Layout().check(DENSE, CLUSTER)


def test_a_table_of_layers_can_be_replicated_and_cut_between_its_rows() -> None:
    row = {"num_params": 1, "num_tensors": 1, "flops": 1, "saved_bytes": 0, "output_bytes": 4}
    table = LayerTable(name="net", layers=[{"name": name, **row} for name in "abc"])
    Layout(data=2, pipeline=3, global_batch=2).check(table)
    with pytest.raises(SpecError, match="4 stages are more than the 3 layers of net; use at most 3"):
        Layout(pipeline=4).check(table)
    with pytest.raises(SpecError, match="tensor=2, but net is a table of layers, which supports only data"):
        Layout(tensor=2).check(table)


def test_every_schedule_has_its_stages() -> None:
    for schedule in schedules():
        layout = Layout(
            pipeline=2, schedule=schedule.name, virtual_stages=schedule.least_stages, global_batch=4
        )
        assert list(problems(layout, DENSE, None)) == []


def test_a_good_layout_of_every_kind_passes() -> None:
    Layout(
        data=4, tensor=4, context=2, pipeline=2, expert=4, zero=3, shard=4, micro_batch=2, global_batch=16,
        sequence_parallel=True,
    ).check(SPARSE)  # fmt: skip
