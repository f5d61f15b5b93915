"""Seeded layouts and jobs predicted, simulated and planned, for `unchanged.py`."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from _unchanged_tools import attempt, plain

import shardscope as ss

LAYOUTS = 400
JOBS = 200
INTERVAL_EVERY = 10
SIMULATE_EVERY = 20
"""Layouts whose interval is recorded, which takes 20 times as long as the prediction, and that are simulated."""
_DEVICES = 64
_MODELS = ("gpt2-xl", "bloom-176b", "llama-2-7b", "llama-3-8b", "llama-2-70b", "mixtral-8x7b", "gpt3-175b")
_SOFTWARE = (None, None, "megatron-core", "fsdp2", "deepspeed")
_STRATEGIES = (
    "all-reduce", "ring", "tree", "hierarchical", "parameter-server", "parameter-server:async", "gossip", "zero-1",
    "zero-2", "zero-3", "pipeline", "pipeline:gpipe", "pipeline:interleaved", "pipeline:zero-bubble", "pipeline:zbv",
)  # fmt: skip


def _clusters() -> dict[str, ss.Cluster]:
    """Return six clusters of 64 devices."""
    of = ss.Cluster.of
    return {
        "a100-80gb": of("a100-80gb", nodes=8),
        "a100-40gb": of("a100-40gb", nodes=8, device_mtbf_hours=50_000),
        "h100": of("h100", nodes=8),
        "h100 slow": of("h100", nodes=16, per_node=4, inter="100 Gbit/s", ports=1, price=2.5),
        "b200": of("b200", nodes=8),
        "v100": of("v100-32gb", nodes=8),
    }


def _degrees(source: random.Random) -> dict[str, int]:
    """Return degrees of parallelism whose product is the number of devices."""
    left, found = _DEVICES, {}
    for axis, most in (("tensor", 8), ("pipeline", 8), ("context", 2)):
        degree = source.choice([each for each in (1, 1, 2, 4, 8) if each <= most and left % each == 0])
        found[axis], left = degree, left // degree
    return {**found, "data": left}


def _layout(source: random.Random) -> dict[str, Any]:
    degrees = _degrees(source)
    micro = source.choice((1, 1, 2, 4))
    fields: dict[str, Any] = {
        **degrees, "micro_batch": micro, "global_batch": degrees["data"] * micro * source.choice((1, 8, 16, 32)),
        "zero": source.choice((0, 1, 2, 3) if degrees["pipeline"] == 1 else (0, 1)),
        "recompute": source.choice(("none", "selective", "full")),
        "sequence_parallel": degrees["tensor"] > 1 and source.random() < 0.5,
        "flash_attention": source.random() < 0.8,
        "precision": source.choice(("bf16-mixed", "fp16-mixed", "fp16-mixed", "fp32", "fp8-mixed")),
        "optimizer": source.choice(("adamw", "adamw", "sgd", "lamb", "lars")),
        "offload": source.choice(("none",) * 8 + ("optimizer", "all")),
        "compression": source.choice(("none",) * 8 + ("int8", "topk")),
    }  # fmt: skip
    if degrees["pipeline"] > 1:
        fields["schedule"] = source.choice(("1f1b", "gpipe", "interleaved", "zb-h1", "zbv", "dualpipev"))
        if fields["schedule"] in {"interleaved", "zbv", "dualpipev"}:
            fields["virtual_stages"] = 2
    return fields


def _predicted(
    model: str, cluster: ss.Cluster, fields: dict[str, Any], software: str | None, kind: int
) -> Any:
    layout = ss.Layout.from_fields(fields)
    found = ss.predict(model, cluster, layout, software=software)
    numbers = {
        name: getattr(found, name)
        for name in (
            "step_time_s", "software", "peak_bytes", "room_bytes", "fits", "tokens_per_s", "mfu", "hfu", "goodput",
            "num_devices", "dollars",
        )
        if hasattr(found, name)
    }  # fmt: skip
    trees = {"time": found.time.to_dict(), "memory": found.memory.to_dict(), "note": found.calibration.note}
    if kind % INTERVAL_EVERY == 0:
        trees |= {"all": found.to_dict(), "text": repr(found), "html": found._repr_html_()}
    if kind % SIMULATE_EVERY == 1:
        trees["simulated"] = _simulated(model, cluster, layout, software=software)
    return {**numbers, **trees}


def _simulated(*described: Any, **options: Any) -> dict[str, Any]:
    found = ss.simulate(*described, **options)
    return {"all": plain(found.to_dict()), "text": repr(found)}


def _layouts() -> Iterator[tuple[str, Any]]:
    source = random.Random("layouts")
    clusters = _clusters()
    for number in range(LAYOUTS):
        model, software, fields = source.choice(_MODELS), source.choice(_SOFTWARE), _layout(source)
        for place, (name, cluster) in enumerate(clusters.items()):
            kind = number + place
            yield (
                f"layout {number} of {model} on {name}",
                attempt(lambda: _predicted(model, cluster, fields, software, kind)),  # noqa: B023
            )


def _own_mlp() -> Any:
    from torch import nn

    return nn.Sequential(nn.Flatten(), nn.Linear(64, 96), nn.GELU(), nn.Linear(96, 10))


def _own_cnn() -> Any:
    from torch import nn

    return nn.Sequential(
        nn.Flatten(),
        nn.Unflatten(1, (1, 64)),
        nn.Conv1d(1, 8, 3, padding=1),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(512, 10),
    )


def _job(source: random.Random) -> dict[str, Any]:
    model = source.choice(("mlp", "cnn", "gpt-nano", "gpt-mini", _own_mlp, _own_cnn))
    is_gpt = isinstance(model, str) and model.startswith("gpt")
    strategy = source.choice(_STRATEGIES)
    world_size = 2 if strategy.startswith("pipeline") else source.choice((2, 4, 4, 8))
    fields: dict[str, Any] = {
        "model": model, "data": "python-source" if is_gpt else "digits", "strategy": strategy,
        "world_size": world_size, "optimizer": source.choice(("adamw", "sgd", "lamb", "lars")), "steps": 20, "seed": 1,
        "batch": {"global_batch": 16 * world_size, "micro_batch": source.choice((4, 8, 16))},
        "precision": source.choice(("fp32", "fp32", "bf16-mixed")),
        "recompute": source.choice(("none", "none", "full")),
    }  # fmt: skip
    if not strategy.startswith("pipeline") and source.random() < 0.25:
        fields["compression"] = source.choice(("bf16", "int8", "topk", "sign", "powersgd"))
    if source.random() < 0.3:
        fields["link"] = {"bandwidth": "1 Gbit/s", "latency": "1 ms"}
    return fields


def _of_job(fields: dict[str, Any], kind: int) -> Any:
    """Return a job predicted and simulated: for this machine, an emulated cluster or GPUs."""
    cluster: Any = None
    if kind % 3 == 1:
        fields = {name: value for name, value in fields.items() if name != "link"}
        cluster = ss.Cluster.of(("a100-80gb", "h100")[kind % 2], per_node=fields["world_size"])
    if kind % 6 == 2:
        fields = {name: value for name, value in fields.items() if name != "link"}
        cluster = ss.Cluster.emulated(2, "1 Gbit/s", "1 ms", per_node=fields["world_size"] // 2)
    job = ss.Job(**fields)
    found = ss.predict(job, cluster)
    told = plain(found.to_dict())
    for changing in ("job", *(() if isinstance(cluster, ss.Cluster) else ("fits",))):
        told.pop(changing)  # a digest of the user's code; the free memory of this machine
    told |= {
        "kinds": plain(found.kinds), "sent": plain(found.sent_bytes), "machine": found.machine_bytes,
        "samples_per_s": found.samples_per_s, "by_rank": [term.to_dict() for term in found.by_rank or ()],
    }  # fmt: skip
    if kind % 4 == 0:
        told |= {"text": repr(found), "html": found._repr_html_()}
    if job.strategy.name == "parameter-server:async":
        told["simulated"] = attempt(lambda: repr(ss.simulate.asynchronous(job, cluster)))
    else:
        told["simulated"] = attempt(lambda: _simulated(job, cluster))
    return told


def _plans() -> Iterator[tuple[str, Any]]:
    small = {"micro_batch": (1, 2), "context": 1, "virtual_stages": (2,)}
    source = random.Random("plans")
    for number in range(20):
        model = source.choice(("gpt2-xl", "llama-2-7b", "llama-3-8b", "bert-large"))
        cluster = ss.Cluster.of(source.choice(("a100-80gb", "h100", "b200")), nodes=source.choice((1, 2)))
        options: dict[str, Any] = {
            "objective": source.choice(("time", "headroom", "tokens_per_s", {"time": 2, "headroom": 1})),
            "global_batch": source.choice((32, 64)), "top": 5,
            "software": source.choice((None, "megatron-core", "fsdp2")),
            "fix": small, "precision": source.choice(("bf16-mixed", "fp16-mixed")),
        }  # fmt: skip
        yield f"plan {number} of {model}", attempt(lambda: _planned(model, cluster, options))  # noqa: B023


def _planned(model: str, cluster: ss.Cluster, options: dict[str, Any]) -> dict[str, Any]:
    found = ss.plan(model, cluster, **options)
    told = {
        "all": plain(found.to_dict()),
        "text": repr(found),
        "html": found._repr_html_(),
        "caveat": found.caveat,
    }
    if len(found) > 1:
        told |= {
            "frame": plain(found.frame.to_dict("list")), "front": plain(found.front.to_dict("list")),
            "explained": repr(found.explain(1, 2)), "explained html": found.explain(1, 2)._repr_html_(),
            "config": attempt(lambda: str(found.trainer_config(1))), "stages": plain(found.stage_layers(1)),
        }  # fmt: skip
    return told


def record(_root: Path) -> dict[str, Any]:
    """Return every prediction, by name."""
    source = random.Random("jobs")
    jobs = {
        f"job {number}": attempt(lambda: _of_job(_job(source), number))  # noqa: B023
        for number in range(JOBS)
    }
    return {**dict(_layouts()), **jobs, **dict(_plans())}
