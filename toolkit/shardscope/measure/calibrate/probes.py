"""The probes: short runs of small jobs, chosen so that each constant dominates some of them."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from shardscope.errors import LaunchError
from shardscope.machine import can_share_memory
from shardscope.runtime import Run, launch
from shardscope.spec import Job
from shardscope.spec.cluster import EmulatedCluster

TEXT, IMAGES = "python-source", "digits"
_ENDLESS = 1_000_000
"""Steps of a language-model probe, which is stopped long before the last one: after its last step, a run evaluates the
model, which takes seconds for language models."""
_SHORT = 30
"""Steps of the other probes."""
_MOST_S = 60.0
"""Seconds after which a probe that makes no progress is aborted."""
_LOOK_EVERY_S = 0.1
"""Seconds between two checks of a probe; reading its events takes time on the cores that the ranks use."""
_ALONE = (
    ("mlp", IMAGES, 32), ("mlp", IMAGES, 512), ("cnn", IMAGES, 64), ("gpt-nano", TEXT, 4), ("gpt-nano", TEXT, 16),
    ("gpt-micro", TEXT, 4), ("gpt-mini", TEXT, 1),
)  # fmt: skip
"""Model, data and batch of the probes on one process."""
_STRATEGIES = (("mlp", IMAGES, "ring"), ("mlp", IMAGES, "zero-3"), ("gpt-micro", TEXT, "ring"))
"""Model, data and strategy of the probes of each transport: few and many small messages, and large ones."""
_MORE = (
    ("gpt-nano", TEXT, "all-reduce"), ("gpt-nano", TEXT, "zero-3"), ("mlp", IMAGES, "zero-1"),
    ("mlp", IMAGES, "pipeline"), ("mlp", IMAGES, "tree"), ("cnn", IMAGES, "ring"),
)  # fmt: skip
"""Model, data and strategy of further probes over the fastest transport."""
_BRIEF_ALONE = (("mlp", IMAGES, 32), ("mlp", IMAGES, 512), ("gpt-nano", TEXT, 4), ("gpt-nano", TEXT, 16))
_BRIEF = (*_STRATEGIES, ("gpt-nano", TEXT, "zero-3"), ("mlp", IMAGES, "pipeline"), ("mlp", IMAGES, "tree"))
"""Model, data and batch or strategy of the probes of a brief calibration, on one process and on several ranks."""
_COMPRESSION = "topk"
"""Compression of the last probe. This probe comes last because its ranks first compile loops, which takes seconds."""
_BATCHES = {"mlp": 32, "cnn": 32, "gpt-nano": 4, "gpt-micro": 2, "gpt-mini": 1}
"""Samples per rank of the probes on several ranks."""


class Probe(NamedTuple):
    """A job to run for a few steps."""

    job: Job
    steps: int = 12
    """Number of steps after which the probe is stopped, unless its job ends before."""


def host_probes(world_sizes: tuple[int, ...] = (2, 4)) -> Iterator[Probe]:
    """Yield the probes of a machine, the most informative ones first.

    Args:
        world_sizes: Numbers of ranks, besides 1.
    """
    for model, data, batch in _ALONE:
        yield Probe(_job(model, data, "single", 1, batch))
    fastest = "shm" if can_share_memory() else "tcp"
    for transport in dict.fromkeys((fastest, "tcp")):
        for ranks in world_sizes:
            for model, data, strategy in _STRATEGIES:
                yield Probe(_job(model, data, strategy, ranks, transport=transport))
    for model, data, strategy in _MORE:
        for ranks in world_sizes:
            yield Probe(_job(model, data, strategy, ranks, transport=fastest))
    yield Probe(_job("gpt-nano", TEXT, "ring", 2, transport=fastest, compression=_COMPRESSION))


def brief_probes(ranks: int) -> Iterator[Probe]:
    """Yield the probes of a brief calibration: on one process and, if `ranks` is above 1, also on that many
    ranks.

    Args:
        ranks: Number of ranks.
    """
    for model, data, batch in _BRIEF_ALONE:
        yield Probe(_job(model, data, "single", 1, batch))
    if ranks > 1:
        for model, data, strategy in _BRIEF:
            yield Probe(_job(model, data, strategy, ranks))


def cluster_probes(cluster: EmulatedCluster) -> Iterator[Probe]:
    """Yield the probes of an emulated cluster, with one rank for each device."""
    ranks = cluster.num_devices
    for model, data, strategy in (*_STRATEGIES, ("gpt-nano", TEXT, "zero-1"), ("mlp", IMAGES, "tree")):
        yield Probe(_job(model, data, strategy, ranks), steps=8)


def _job(model: str, data: str, strategy: str, ranks: int, batch: int | None = None, **settings: Any) -> Job:
    samples = batch or ranks * _BATCHES[model]
    micro = samples // (2 * ranks) if strategy == "pipeline" else None
    return Job(
        model=model, data=data, strategy=strategy, world_size=ranks, device="cpu", name="probe",
        steps=_SHORT if data == IMAGES else _ENDLESS, batch={"global_batch": samples, "micro_batch": micro}, **settings,
    )  # fmt: skip


def _ended(run: Run, probe: Probe) -> Run:
    """Wait until the run has ended, and stop it on a timeout or when the user interrupts."""
    try:
        return run.wait(_MOST_S)
    except TimeoutError:
        raise LaunchError(
            f"{probe.job.label} with world_size={probe.job.world_size} has not finished {probe.job.steps} steps within "
            f"{_MOST_S:g} s; calibrate again when other programs leave the cores free"
        ) from None
    finally:
        run.stop()


def run_probe(probe: Probe, cluster: EmulatedCluster | None, root: Path) -> Run:
    """Run a probe until it has finished its steps, stop it, and return the run.

    Raises:
        RunFailed: A rank failed.
        LaunchError: The cluster cannot be emulated here, or the run cannot be started or takes too long.
    """
    run = launch(probe.job, cluster, root=root, made_by="calibrate", preflight=False)
    if probe.job.steps < _ENDLESS:
        return _ended(run, probe)
    tail, done, until = run.tail(), 0, time.monotonic() + _MOST_S
    try:
        while run.is_alive and done < probe.steps and time.monotonic() < until:
            time.sleep(_LOOK_EVERY_S)
            done += sum(event["event"] == "step" and event["rank"] == 0 for event in tail.poll())
    finally:
        run.stop()
    if run.state == "failed":
        run.wait()  # raises the error of the rank that failed
    return run
