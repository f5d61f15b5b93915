"""The first run of a study without a given space: it measures the gradient noise scale, to choose batch sizes.

The run takes the first steps of the job and is stored in ``<study>/probe``; it is not a trial. If the process stops
before the study is created, the next attempt reuses the run. A resumed study reads the measured value from its
definition.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Literal

from optuna.storages import BaseStorage

from shardscope.errors import SpecError, StudyError
from shardscope.runtime import launch, runs
from shardscope.runtime.record.run import Run
from shardscope.spec import Checkpoint, Job
from shardscope.tuning.apply import MemoryLimit
from shardscope.tuning.batch_range import BatchRange, around
from shardscope.tuning.definition import Definition
from shardscope.tuning.pruning.halving import delete
from shardscope.tuning.runs import run_to_end
from shardscope.tuning.storage import answering, begun_as

BatchesAround = Literal["noise", "job"]
_MOST_STEPS, _LEAST_STEPS = 200, 20
_SHARE = 0.5
"""Fraction of the job's steps in the measuring run. The noise scale grows as the loss falls, fastest at the start."""
_SMOOTHING = 0.95
"""Decay factor of the exponential average over steps, which spans only about 20 steps because the noise scale keeps
growing."""


class NotMeasured(StudyError):
    """A study was stopped before its noise scale was measured; the study has not been created."""


def resolve_batch_range(
    definition: Definition,
    storage: BaseStorage,
    name: str,
    folder: Path,
    *,
    around_what: BatchesAround,
    limit: MemoryLimit,
    stopping: threading.Event | None = None,
    on_probe: Callable[[Job], None] | None = None,
) -> Definition:
    """Return the definition with the batch range of the existing study or, for a new study, with a newly chosen range.

    Args:
        definition: Definition with the default space; returned unchanged if it does not search batch sizes.
        storage: Storage of the study.
        name: Name of the study.
        folder: Folder of the study; the measuring run goes into ``probe`` inside it.
        around_what: Centre of the range: ``noise`` for the measured critical batch size, ``job`` for the job's batch
            size.
        limit: Memory limit that larger batches must respect.
        stopping: Event that interrupts the measurement.
        on_probe: Called with the job of the measuring run before it is launched.

    Raises:
        NotMeasured: `stopping` was set before the noise scale was measured.
        StudyError: The study with this name was created by another program; nothing is measured.
    """
    if "batch" not in definition.space.parameters:
        return definition
    with answering(name):
        begun = begun_as(storage, name)
    job = definition.job
    found = BatchRange(own=job.batch.global_batch)
    if begun is None and around_what == "noise":
        found = measured(job, folder / "probe", stopping, on_probe)
        with answering(name):
            begun = begun_as(storage, name)  # another driver may have created the study in the meantime
    if begun is None:
        batches = around(job, found.critical, fits=lambda other: limit.fault(other) is None)
        return definition.centred(batches, found)
    if begun.batch_range is None:
        return definition
    return definition.centred(begun.space.parameters.get("batch"), begun.batch_range)


def measured(
    job: Job,
    root: Path,
    stopping: threading.Event | None = None,
    on_probe: Callable[[Job], None] | None = None,
) -> BatchRange:
    """Measure the critical batch size of a job, from the gradient noise scale of its first steps.

    The noise scale is measured for the plain gradient (McCandlish et al. 2018). With a preconditioning
    optimizer (AdamW, LAMB), the critical batch size depends on the noise of the preconditioned gradient.
    Therefore the result is used only as the centre of a search range.

    Args:
        job: The job to measure.
        root: Folder of the measuring run.
        stopping: Event that interrupts the measurement.
        on_probe: Called with the job of the measuring run, unless an earlier attempt has already completed that run.

    Raises:
        NotMeasured: `stopping` was set before the run had ended.
    """
    own = job.batch.global_batch
    try:
        probe = probe_of(job)
    except SpecError as error:
        clause = str(error).split(";")[0].removeprefix("record.noise_scale=True ")
        return BatchRange(own=own, why_not=f"measuring the gradient noise scale {clause}")
    run = _finished(probe, root) or _run(probe, root, stopping, on_probe)
    delete(str(run.path), root)
    if run.state != "completed":
        return BatchRange(
            own=own,
            run=str(run.path),
            why_not=f"the run that should have measured the noise scale {_end_of(run)}",
        )
    return _batch_range(run, own)


def probe_of(job: Job) -> Job:
    """Return a job that takes the first steps of `job` and measures the noise scale in every step.

    Raises:
        SpecError: The noise scale cannot be measured for this job.
    """
    steps = min(job.steps, _MOST_STEPS, max(_LEAST_STEPS, round(_SHARE * job.steps)))
    record = job.record.replace(noise_scale=True, noise_every=1)
    return job.replace(
        record=record, until=steps if steps < job.steps else None, checkpoint=Checkpoint(), name="noise-scale"
    )


def _finished(probe: Job, root: Path) -> Run | None:
    """Return the completed run of exactly this job from an earlier attempt; None if there is none."""
    asked = probe.model_dump_json()
    for run in runs(root) if root.is_dir() else ():
        if run.state == "completed" and run.job.model_dump_json() == asked:
            return run
    return None


def _run(
    probe: Job, root: Path, stopping: threading.Event | None, on_probe: Callable[[Job], None] | None
) -> Run:
    if on_probe is not None:
        on_probe(probe)
    run = launch(probe, root=root)
    if run_to_end(run, stop_when=lambda _: stopping is not None and stopping.is_set()):
        raise NotMeasured(
            "stopped while the noise scale was being measured, before the study was created; allow more time, or "
            "centre the batch sizes on the job's own (batch_range='job')"
        )
    return run


def _end_of(run: Run) -> str:
    return f"failed: {str(run.error).splitlines()[0]}" if run.error is not None else f"was {run.state}"


def _batch_range(run: Run, own: int) -> BatchRange:
    noise = run.noise_scale(_SMOOTHING)
    about = {"own": own, "steps": len(noise.steps), "run": str(run.path)}
    if (
        noise.latest is None
        or noise.interval is None
        or not (math.isfinite(noise.latest) and noise.latest > 0)
    ):
        return BatchRange(
            **about,
            why_not=f"the gradient could not be distinguished from its noise in {len(noise.steps)} steps",
        )
    low, high = noise.interval
    return BatchRange(
        **about, critical=noise.latest, low=max(low, 0.0), high=high if math.isfinite(high) else None
    )
