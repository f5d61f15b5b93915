"""The oracle of a search: nested Python loops over every axis, `Layout.check`, and Python's own sort."""

from __future__ import annotations

from itertools import product

from shardscope.analytic.layouts import Layouts
from shardscope.analytic.memory import FRAMEWORKS, device_memory
from shardscope.calibration.calibration import Calibration
from shardscope.errors import SpecError
from shardscope.planner import SearchAxes
from shardscope.prediction.step import step_time
from shardscope.spec.cluster import Cluster, Device, Link
from shardscope.spec.layout import Layout
from shardscope.spec.model import Mixture, Model

CALIBRATION = Calibration(name="test")
NARROW = {"micro_batch": [1, 2], "virtual_stages": [2], "offload": ["none", "optimizer", "all"]}
"""Axes held short, so that loops take seconds."""


def small_model(*, experts=0, layers=8, **sizes):
    mixture = Mixture(experts=experts, active=2, ffn=256) if experts else None
    settings = {"hidden": 128, "heads": 4, "vocab": 512, "seq": 64, "mixture": mixture} | sizes
    return Model.transformer(name="small", layers=layers, **settings)


def machine(
    *, nodes=1, per_node=4, memory_gb=16.0, intra=300e9, inter=25e9, host_bandwidth=25e9, price=2.0, host=1e12
):
    """Return a cluster whose devices have `memory_gb` for tensors."""
    memory = memory_gb * 1e9 * FRAMEWORKS["megatron-core"].reserved
    device = Device(
        name="test", memory_bytes=memory, memory_bandwidth=2e12, source="made up",
        peak_flops={"bf16": 312e12, "fp32": 20e12}, host_bandwidth=host_bandwidth,
    )  # fmt: skip
    return Cluster(
        name="test", device=device, nodes=nodes, per_node=per_node, price_per_device_hour=price, host_memory_bytes=host,
        intra=Link(name="near", bandwidth=intra, latency_s=3e-6, source="made up"),
        inter=Link(name="far", bandwidth=inter, latency_s=5e-6, source="made up"),
    )  # fmt: skip


def every_layout(model, cluster, *, batch, space):
    """All layouts that can be, each once: what `Layout.check` accepts, less twins and uneven chunks."""
    devices = cluster.num_devices
    degrees = range(1, devices + 1)
    experts = range(1, model.mixture.experts + 1) if model.mixture else [1]
    states = [(zero, kind) for zero in space.zero for kind in (space.shard if zero else ["all"])]
    sizes = space.micro_batch or range(1, 17)
    for tensor, pipeline, context, expert in product(degrees, degrees, degrees, experts):
        if devices % (tensor * pipeline * context) or (model.mixture and model.mixture.experts % expert):
            continue
        data = devices // (tensor * pipeline * context)
        for size, (schedule, held), sequence, recompute, (zero, kind), offload, compression in product(
            sizes, space.schedule_options, space.sequence_parallel, space.recompute, states, space.offload,
            space.compression,
        ):  # fmt: skip
            if pipeline == 1 and (schedule, held) != space.schedule_options[0]:
                continue  # a twin
            if pipeline > 1 and held > 1 and model.layers % (pipeline * held):
                continue
            if recompute == "selective":
                continue  # with flash attention a twin of none
            ranks, shard = data * context, 0
            if zero and ranks == 1:
                continue  # a twin of ZeRO 0
            if zero and kind == "node":
                shard = max(
                    n
                    for n in range(1, ranks + 1)
                    if ranks % n == 0 and max(1, cluster.per_node // tensor) % n == 0
                )
                if shard in {1, ranks}:
                    continue  # no shard, or a twin of all
            layout = Layout(
                data=data, tensor=tensor, pipeline=pipeline, context=context, expert=expert, zero=zero, shard=shard,
                global_batch=batch, micro_batch=size, schedule=schedule, virtual_stages=held if pipeline > 1 else 1,
                recompute=recompute, sequence_parallel=sequence, offload=offload, compression=compression,
            )  # fmt: skip
            try:
                layout.check(model, cluster)
            except SpecError:
                continue
            yield layout


def with_fewest_recomputed(model, cluster, layouts, *, memory_bytes):
    """Those that do not fit without recomputation, with the smallest number of layers with which they fit."""
    left = [layout for layout in layouts if layout.recompute == "none"]
    found = []
    for count in range(model.layers):
        left = [layout for layout in left if layout.pipeline * layout.virtual_stages * count < model.layers]
        tried = [
            layout.replace(recompute="full" if count else "none", recompute_layers=count) for layout in left
        ]
        sizes = [size for _, size in scored(model, cluster, tried)] if tried else []
        found += [layout for layout, size in zip(tried, sizes, strict=True) if count and size <= memory_bytes]
        left = [layout for layout, size in zip(left, sizes, strict=True) if size > memory_bytes]
    return found


def scored(model, cluster, layouts):
    """(seconds, bytes) of each layout."""
    table = Layouts.of(layouts)
    host = cluster.host_memory_bytes / cluster.per_node
    times = step_time(model, table, cluster, CALIBRATION).total
    sizes = device_memory(model, table, host_capacity=host).total
    return list(zip(times.tolist(), sizes.tolist(), strict=True))


def space(**changes):
    return SearchAxes().fixed(NARROW | changes)
