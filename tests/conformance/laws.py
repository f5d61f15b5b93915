"""Random layouts and jobs, and the laws that their predictions must keep."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import shardscope as ss
from shardscope.errors import ShardscopeError
from shardscope.spec.layout import schedule_names
from shardscope.spec.pipeline_schedule import schedules
from shardscope.spec.strategy import strategies

SLACK = 1 + 1e-9
EXPLAINED = {each.name: 1.005 for each in schedules() if each.splits_backward}
"""By how much more of something may be slower, as the docstring of `prediction.step.step.even_time` says."""
ANOMALY = 1.1
"""The same for pipelines of jobs, whose messages may change their order; see `prediction.pipeline_time`."""
MODELS = ("gpt3-175b", "llama-2-13b", "llama-3-8b", "mixtral-8x7b", "gemma-2-9b")
DEVICES = ("a100-80gb", "h100-80gb", "v100-32gb")
IN_V = ("zbv", "v-half", "v-min", "dualpipev")
IN_ROUNDS = ("interleaved", "zero-bubble")
RECOMPUTE = ("none", "selective", "full")
Layouts = tuple[Any, ss.Cluster, ss.Layout]


def draw_layout(source: random.Random) -> Layouts:
    """Return a model, a cluster and a valid layout."""
    while True:
        model = ss.Model.of(source.choice(MODELS))
        tensor, data = source.choice((1, 1, 2, 4, 8)), source.choice((1, 2, 4, 8))
        pipeline, context = source.choice((1, 2, 4, 8, 16)), source.choice((1, 1, 1, 2))
        schedule, micro_batch = source.choice(schedule_names()), source.choice((1, 2, 4))
        held = 2 if schedule in IN_V else source.choice((2, 3)) if schedule in IN_ROUNDS else 1
        devices = data * tensor * pipeline * context
        try:
            layout = ss.Layout(
                data=data, tensor=tensor, pipeline=pipeline, context=context, zero=source.choice((0, 0, 1, 2, 3)),
                expert=source.choice((1, 1, 2, 4)), micro_batch=micro_batch, schedule=schedule,
                global_batch=data * micro_batch * source.choice((1, 2, 4, 8, 16, 32)),
                virtual_stages=held if pipeline > 1 else 1, recompute=source.choice(RECOMPUTE),
                sequence_parallel=tensor > 1 and source.random() < 0.5,
                precision=source.choice(("bf16-mixed", "fp16-mixed", "fp32")),
                offload=source.choice(("none", "none", "optimizer", "activations")),
                compression=source.choice(("none", "none", "topk", "int8", "powersgd", "fp16")) if data > 1 else "none",
            )  # fmt: skip
            per_node = min(source.choice((4, 8)), devices)
            cluster = ss.Cluster.of(source.choice(DEVICES), nodes=devices // per_node, per_node=per_node)
            ss.predict(model, cluster, layout)
        except ShardscopeError:
            continue
        return model, cluster, layout


def better_clusters(cluster: ss.Cluster, factor: float) -> Iterator[tuple[str, ss.Cluster]]:
    """Yield clusters that have more of one thing, with its name."""
    device = cluster.device
    peaks = {precision: factor * rate for precision, rate in device.peak_flops.items()}
    for name, better in (
        ("FLOP/s", device.replace(peak_flops=peaks)),
        ("memory bandwidth", device.replace(memory_bandwidth=factor * device.memory_bandwidth)),
        ("memory", device.replace(memory_bytes=factor * device.memory_bytes)),
        ("host bandwidth", device.replace(host_bandwidth=factor * device.host_bandwidth)),
    ):
        yield name, cluster.replace(device=better)
    for side in ("intra", "inter"):
        link = getattr(cluster, side)
        yield f"{side} bandwidth", cluster.replace(**{side: link.replace(bandwidth=factor * link.bandwidth)})
        yield f"{side} latency", cluster.replace(**{side: link.replace(latency_s=link.latency_s / factor)})
    yield "host memory", cluster.replace(host_memory_bytes=factor * cluster.host_memory_bytes)
    if cluster.nvme_bandwidth:
        yield "drives", cluster.replace(nvme_bandwidth=factor * cluster.nvme_bandwidth)


def lighter_layouts(model: Any, layout: ss.Layout) -> Iterator[tuple[str, Any, ss.Layout]]:
    """Yield models and layouts of which less is in memory at a time, with what is less."""
    if layout.micro_batch > 1:
        halved = {"micro_batch": layout.micro_batch // 2, "global_batch": layout.global_batch // 2}
        yield "samples", model, layout.replace(**halved)
    weaker = RECOMPUTE.index(layout.recompute)
    if weaker < 2:
        yield "activations kept", model, layout.replace(recompute=RECOMPUTE[weaker + 1])
    yield "seq", model.replace(seq=model.seq // 2), layout
    yield "layers", model.replace(layers=model.layers // 2), layout


def broken_by_layout(source: random.Random) -> list[str]:
    """Draw a layout, and return the laws that its prediction breaks."""
    model, cluster, layout = draw_layout(source)
    found, usual = [], ss.predict(model, cluster, layout)
    for name, better in better_clusters(cluster, source.choice((1.1, 2.0, 10.0))):
        now = ss.predict(model, better, layout)
        slack = EXPLAINED.get(layout.schedule, SLACK)
        if now.step_time_s > usual.step_time_s * slack:
            found.append(f"more {name}: {now.step_time_s / usual.step_time_s:.6f} of the time, {layout!r}")
        if now.peak_bytes > usual.peak_bytes * SLACK or (usual.fits and not now.fits):
            found.append(f"more {name}: {now.peak_bytes / usual.peak_bytes:.6f} of the memory, {layout!r}")
    for name, smaller, lighter in lighter_layouts(model, layout):
        try:
            now = ss.predict(smaller, cluster, lighter)
        except ShardscopeError:
            continue  # not every combination is valid
        if now.peak_bytes > usual.peak_bytes * SLACK:
            found.append(f"less {name}: {now.peak_bytes / usual.peak_bytes:.6f} of the memory, {layout!r}")
    return found


def draw_job(source: random.Random) -> tuple[ss.Job, dict[str, Any]]:
    """Return a valid job, and the keywords of an emulated cluster."""
    while True:
        ranks, kind = (
            source.choice((2, 3, 4, 6, 8)),
            source.choice([*strategies(), "pipeline", "parameter-server"]),
        )
        settings: dict[str, Any] = {}
        if kind == "pipeline":
            settings = {"schedule": source.choice(schedule_names())}
        elif kind == "parameter-server":
            settings = {
                "mode": source.choice(("sync", "async", "ssp")), "servers": source.choice((1, 1, 2)),
                "dedicated": source.random() < 0.4,
            }  # fmt: skip
        model = source.choice(("mlp", "gpt-nano"))
        cluster = {
            "nodes": ranks, "bandwidth": 10 ** source.uniform(6, 10), "latency": source.choice((0.0, 1e-4, 5e-3)),
            "flops": 10 ** source.uniform(8, 12),
            "slowdown": {rank: source.choice((1.0, 1.5, 3.0)) for rank in range(ranks)},
        }  # fmt: skip
        if ranks % 2 == 0 and source.random() < 0.4:
            cluster |= {"racks": 2, "rack_bandwidth": 10 ** source.uniform(6, 9)}
        try:
            job = ss.Job(
                model=model, data="digits" if model == "mlp" else "python-source", strategy={"name": kind, **settings},
                world_size=ranks,
                batch=ss.Batch(ranks * source.choice((2, 4, 8)), micro_batch=source.choice((None, 1, 2))),
                optimizer=source.choice(("adamw", "sgd", "lamb")), recompute=source.choice(("none", "full")),
                compression=source.choice(("none", "none", "none", "topk", "int8", "powersgd", "local-sgd", "fp16")),
                clip_norm=source.choice((None, 1.0)),
            )  # fmt: skip
            if ss.predict(job, ss.Cluster.emulated(**cluster)).step_time_s is not None:
                return job, cluster
        except ShardscopeError:
            continue


def broken_by_job(source: random.Random) -> list[str]:
    """Draw a job on an emulated cluster, and return the laws that its prediction breaks."""
    job, given = draw_job(source)
    bound = getattr(job.strategy, "bound", 0.0)
    is_explained = 0 < bound < float("inf")  # see `prediction.loads.gradients_per_s`
    slack = ANOMALY if job.strategy.name == "pipeline" else SLACK
    usual = ss.predict(job, ss.Cluster.emulated(**given))
    factor, node, found = source.choice((1.1, 2.0, 10.0)), source.choice(list(given["slowdown"])), []
    changes = {
        "FLOP/s": {"flops": factor * given["flops"]}, "bandwidth": {"bandwidth": factor * given["bandwidth"]},
        "latency": {"latency": given["latency"] / factor},
        "speed of one node": {"slowdown": {**given["slowdown"], node: 1.0}},
    }  # fmt: skip
    if "rack_bandwidth" in given:
        changes["rack bandwidth"] = {"rack_bandwidth": factor * given["rack_bandwidth"]}
    for name, change in changes.items():
        now = ss.predict(job, ss.Cluster.emulated(**{**given, **change}))
        for what, before, after in (
            ("step", usual.step_time_s, now.step_time_s), ("run", usual.run_time_s, now.run_time_s),
            ("time of a sample", 1 / usual.samples_per_s, 1 / now.samples_per_s),
            ("memory", usual.peak_bytes, now.peak_bytes),
        ):  # fmt: skip
            if is_explained and what != "memory":
                continue
            allowed = SLACK if what == "memory" else slack
            if before is not None and after is not None and after > before * allowed:
                found.append(
                    f"better {name}: {after / before:.6f} of the {what}, {job.strategy!r} on {given}"
                )
    return found
