"""Adding bandwidth never slows a plan: no link of a cluster, its hosts' and drives' included, makes a step longer."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from shardscope.analytic.layouts import Layouts
from shardscope.calibration.calibration import Calibration
from shardscope.prediction.step import step_time
from shardscope.spec.cluster import Cluster, Device, Link
from shardscope.spec.compression import compression_names
from shardscope.spec.layout import OFFLOAD_NAMES, RECOMPUTE_NAMES, Layout
from shardscope.spec.model import Mixture, Transformer
from shardscope.spec.pipeline_schedule import schedules

DENSE = Transformer(layers=22, hidden=2048, heads=16, vocab=51200, seq=1024)
SPARSE = DENSE.replace(
    layers=24, tied=False, gated=True, mixture=Mixture(experts=16, active=2, ffn=1024, dense_layers=1)
)
LINKS = ("intra", "inter", "host", "drives", "memory")
EVERY_SCHEDULE = [
    (schedule.name, held)
    for schedule in schedules()
    for held in ([schedule.least_stages] if schedule.most_stages else [2, 3])
]
ONE_STAGE = [(name, held) for name, held in EVERY_SCHEDULE if held == 1]
few = st.sampled_from([1, 2, 3, 4, 8])


@st.composite
def jobs(draw: st.DrawFn, schedules: list[tuple[str, int]] = EVERY_SCHEDULE) -> tuple[Transformer, Layout]:
    """A model and a layout of it with everything on."""
    model = draw(st.sampled_from([DENSE, SPARSE]))
    data, tensor, pipeline = draw(few), draw(st.sampled_from([1, 2, 4, 8])), draw(few)
    context = draw(st.sampled_from([1, 2]))
    ranks, micro = data * context, draw(st.sampled_from([1, 2, 4]))
    rounds = draw(st.integers(1, 5))
    schedule, held = draw(st.sampled_from(schedules))
    by_rounds = schedule in {"interleaved", "zero-bubble", "dualpipev"}
    count = 2 * rounds * pipeline if by_rounds else rounds
    zero = draw(st.integers(0, 3))
    shards = [n for n in range(1, ranks + 1) if ranks % n == 0]
    experts = [n for n in shards if 16 % n == 0] if model.mixture else [1]
    packings = compression_names() if ranks > 1 else ("none",)
    layout = Layout(
        data=data, tensor=tensor, pipeline=pipeline, context=context, expert=draw(st.sampled_from(experts)),
        zero=zero, shard=draw(st.sampled_from([0, *shards])) if zero else 0, micro_batch=micro,
        global_batch=data * micro * count, schedule=schedule, virtual_stages=held if pipeline > 1 else 1,
        recompute=draw(st.sampled_from(RECOMPUTE_NAMES)), offload=draw(st.sampled_from(OFFLOAD_NAMES)),
        compression=draw(st.sampled_from(packings)), sequence_parallel=tensor > 1 and draw(st.booleans()),
        flash_attention=draw(st.booleans()),
    )  # fmt: skip
    assume(pipeline * layout.virtual_stages <= model.layers)
    layout.check(model)
    return model, layout


def rates(least: float, most: float) -> st.SearchStrategy[float]:
    return st.floats(np.log10(least), np.log10(most)).map(lambda power: float(10**power))


clusters = st.builds(
    lambda intra, inter, host, drives, memory, room, per_node, nodes: Cluster(
        name="made up", nodes=nodes, per_node=per_node, host_memory_bytes=room, nvme_bytes=1e15, nvme_bandwidth=drives,
        device=Device(
            name="made up", memory_bytes=8e10, memory_bandwidth=memory, host_bandwidth=host, source="made up",
            peak_flops={"bf16": 3e14},
        ),
        intra=Link(name="near", bandwidth=intra, latency_s=3e-6, source="made up"),
        inter=Link(name="far", bandwidth=inter, latency_s=5e-6, source="made up"),
    ),
    rates(1e9, 1e12), rates(1e8, 1e11), rates(1e9, 1e12), rates(1e9, 1e12), rates(1e11, 1e13), rates(1e9, 1e13),
    st.sampled_from([1, 3, 4, 8]), st.sampled_from([1, 4096]),
)  # fmt: skip
calibrations = st.builds(
    lambda gradient, shard, launch: Calibration(
        name="made up", gradient_overlap=gradient, shard_overlap=shard, launch_s=launch
    ),
    st.floats(0, 1), st.floats(0, 1), st.sampled_from([0.0, 5e-6, 1e-4]),
)  # fmt: skip


def faster(cluster: Cluster, link: str, factor: float) -> Cluster:
    """The cluster with one kind of link so many times as fast."""
    if link == "drives":
        return cluster.replace(nvme_bandwidth=cluster.nvme_bandwidth * factor)
    if link in {"host", "memory"}:
        field = f"{link}_bandwidth"
        device = cluster.device.replace(**{field: getattr(cluster.device, field) * factor})
        return cluster.replace(device=device)
    one = getattr(cluster, link)
    return cluster.replace(**{link: one.replace(bandwidth=one.bandwidth * factor)})


def seconds(model: Transformer, layout: Layout, cluster: Cluster, calibration: Calibration) -> float:
    return float(step_time(model, Layouts.of([layout]), cluster, calibration).total[0])


anything = given(jobs(), clusters, calibrations, st.sampled_from(LINKS), st.floats(1.001, 30))


@settings(max_examples=150, deadline=None)
@anything
def test_more_bandwidth_of_any_link_never_slows_a_step(
    job: tuple[Transformer, Layout], cluster: Cluster, calibration: Calibration, link: str, factor: float
) -> None:
    before = seconds(*job, cluster, calibration)
    assert seconds(*job, faster(cluster, link, factor), calibration) <= before * (1 + 1e-12)


@pytest.mark.slow
@settings(max_examples=60, deadline=None)
@given(
    jobs(ONE_STAGE), clusters, st.floats(0.2, 5), calibrations, st.sampled_from(LINKS), st.floats(1.001, 30)
)
def test_nor_on_a_mixed_cluster(
    job: tuple[Transformer, Layout],
    cluster: Cluster,
    speed: float,
    calibration: Calibration,
    link: str,
    factor: float,
) -> None:
    half = max(1, job[1].num_devices // 2 // cluster.per_node)

    def mixed(base: Cluster) -> Cluster:
        peaks = {name: peak * speed for name, peak in base.device.peak_flops.items()}
        other = base.device.replace(peak_flops=peaks, memory_bandwidth=base.device.memory_bandwidth * speed)
        return Cluster.mixed(base.replace(nodes=half), base.replace(nodes=half, device=other))

    before = seconds(*job, mixed(cluster), calibration)
    assert seconds(*job, mixed(faster(cluster, link, factor)), calibration) <= before * (1 + 1e-9)
