"""Runs whose number of ranks changes while they train, for tests."""

from __future__ import annotations

from typing import Any

import torch

import shardscope as ss
from conformance.light import deep, slow_loss
from conformance.runs import small_job, wait_for
from oracle import plain
from shardscope.runtime.tools.check import read_parameters

STEPS = 24


def elastic_job(**changes: Any) -> ss.Job:
    """A job for 2 to 4 ranks, on each of which its batch can be divided."""
    model = deep if "pipeline" in str(changes.get("strategy")) else "mlp"
    fields: dict[str, Any] = {
        "model": model, "steps": STEPS, "batch": 48, "elastic": "2:4", "loss": slow_loss,
        "record": ss.Record(parameters=True),
        "optimizer": ss.Optimizer("sgd", lr=0.05, momentum=0.9), "timeout_s": 30,
    }  # fmt: skip
    return small_job(**{**fields, **changes})


def resized(job: ss.Job, *sizes: int) -> ss.Run:
    """A finished run that took two steps or more on each of these numbers of ranks, after its own."""
    run = ss.launch(job)
    at = 0
    for before, size in zip((job.world_size, *sizes), sizes, strict=False):
        wait_for(lambda: run.reduced().last_step >= at + 2 and run.world_size == before, run)  # noqa: B023
        at = run.reduced().last_step
        run.resize(size)
    return run.wait(120)


def fixed(job: ss.Job) -> ss.Run:
    """The same job on its own number of ranks, to its end."""
    return ss.launch(job.replace(elastic=None, loss="cross-entropy")).wait(120)


def apart(run: ss.Run, other: ss.Run) -> tuple[float, float]:
    """Relative differences of the losses, step by step, and of all parameters as one vector."""
    losses = [list(each.reduced().steps.column("loss")) for each in (run, other)]
    theirs = {name: torch.as_tensor(value) for name, value in read_parameters(other).items()}
    return plain.losses_apart(*losses), plain.difference(read_parameters(run), theirs)
