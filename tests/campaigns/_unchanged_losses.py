"""Losses to the bit, bytes and messages, and the JSON of jobs, for `unchanged.py`.

Every strategy, compressor, optimizer and learning-rate schedule trains a few steps, at 1, 2 or 3 ranks.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import shardscope as ss
from shardscope.spec.registry import names

_BASE = {"model": "mlp", "data": "digits", "world_size": 3, "batch": 48, "steps": 6, "seed": 3}
_STRATEGIES = (
    "single", "all-reduce", "ring", "ring:2", "tree", "hierarchical", "parameter-server", "gossip", "zero-1", "zero-2",
    "zero-3", "zero-3:backend", "pipeline", "pipeline:gpipe", "pipeline:interleaved", "pipeline:zero-bubble",
    "pipeline:zbv", "pipeline:dualpipev",
)  # fmt: skip
_NEEDS: dict[str, dict[str, Any]] = {
    "dgc": {"optimizer": "sgd"},
    "onebit-adam": {"optimizer": "adamw", "steps": 9},
    "onebit-lamb": {"optimizer": "lamb", "steps": 9},
}
"""Of compressors that do not go with the base."""
_SHAPES: tuple[dict[str, Any], ...] = (
    {"name": "linear", "warmup_steps": 2}, {"name": "sqrt", "warmup_steps": 2}, {"name": "polynomial", "power": 3.0},
    {"name": "cosine", "final_ratio": 0.1}, {"name": "exponential"},
)  # fmt: skip


def _jobs() -> Iterator[tuple[str, dict[str, Any]]]:
    """Each job by name, as the fields that describe it."""
    for strategy in _STRATEGIES:
        alone = {"world_size": 1} if strategy == "single" else {}
        even = {"world_size": 2} if strategy.startswith(("hierarchical", "pipeline")) else {}
        yield f"strategy {strategy}", {**_BASE, "strategy": strategy, **alone, **even}
    for optimizer in names(ss.Optimizer):
        for strategy in ("ring", "zero-1", "zero-3"):
            yield f"optimizer {optimizer} {strategy}", {**_BASE, "strategy": strategy, "optimizer": optimizer}
    for compression in names(ss.Compression):
        if compression != "none":
            fields = {"strategy": "ring", "compression": compression, **_NEEDS.get(compression, {})}
            yield f"compression {compression}", {**_BASE, **fields}
    for shape in _SHAPES:
        yield f"schedule {shape['name']}", {**_BASE, "strategy": "all-reduce", "lr_schedule": shape}


def _outcome(fields: dict[str, Any], root: Path) -> dict[str, Any]:
    """What training a job comes to."""
    try:
        job = ss.Job.from_fields(fields)
        run = ss.launch(job, root=root).wait(120)
    except ss.ShardscopeError as error:
        return {"error": str(error)}
    steps = run.events("step")
    return {
        "job": json.loads(job.to_json()),
        "losses": [[event["rank"], event["step"], event["loss"], event["lr"]] for event in steps],
        "traffic": [[event["rank"], event["step"], event["traffic"]] for event in steps],
    }


def record(root: Path) -> dict[str, Any]:
    """Return what each job came to, by name."""
    return {name: _outcome(job, root) for name, job in _jobs()}


def differences(before: dict[str, Any], after: dict[str, Any]) -> Iterator[str]:
    """Yield what differs between two records of a job."""
    if "error" in before or "error" in after:
        if before != after:
            yield f"was {before.get('error', 'trained')!r}, is {after.get('error', 'trained')!r}"
        return
    for part in ("losses", "traffic"):
        if sorted(map(json.dumps, before[part])) != sorted(map(json.dumps, after[part])):
            yield f"{part} differ"
    if ss.Job.from_fields(before["job"]) != ss.Job.from_fields(after["job"]):
        yield "the recorded JSON describes another job"
