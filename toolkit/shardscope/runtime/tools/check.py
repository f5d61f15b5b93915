"""Check a job: run it on its ranks and on one process, and compare losses and parameters.

Distributing the work must not change the result of training. `check` tests this for any job, with the user's own model
and data: both runs train on the same global batches in the same order, and write all parameters at the end.

Both runs have the same micro-batches. A third run, on one process with the whole batch in one micro-batch, shows
whether the result depends on how the batch is split, as with a loss that does not report how many targets count.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from math import gcd
from pathlib import Path

import numpy as np

from shardscope.errors import LaunchError, RunFailed, SpecError, require
from shardscope.runtime.launcher.driver import launch
from shardscope.runtime.record.run import Run
from shardscope.runtime.tools.check_report import CheckReport, compare, cut_difference
from shardscope.spec import Batch, Checkpoint, Compression, Job, Record, Strategy
from shardscope.spec.job_parts import label_of

OnStep = Callable[[Run, int], None]
"""Callback that receives the current run and the number of steps that all its ranks have finished."""
_POLL_S = 0.1


def check(
    job: Job, steps: int = 8, *, root: str | Path | None = None, on_step: OnStep | None = None
) -> CheckReport:
    """Run a job on its ranks and on one process, and compare all losses and parameters. Return when all have ended.

    The job runs twice on one process: in micro-batches of a rank's size, and with the whole batch in one micro-batch.

    Args:
        job: Job to check; its number of steps is replaced by `steps`, and no checkpoints are written.
        steps: Number of optimizer steps of each run, at least 1.
        root: Folder of the run directories; None uses ``$SHARDSCOPE_RUNS`` or ``./runs``.
        on_step: Called about ten times a second during a run; an exception from it stops the run and the check.

    Raises:
        SpecError: The job already runs on one process, or `steps` is not valid for it.
        RunFailed: A rank of one of the runs failed (the message names rank, step and strategy), or a run was stopped.

    Example:
        >>> import shardscope as ss
        >>> ss.check(ss.Job(model="mlp", data="digits", strategy="ring"))  # doctest: +SKIP
    """
    sharded, alone = both_jobs(job, steps)
    first, second = _carry_out(sharded, root, on_step), _carry_out(alone, root, on_step)
    whole, why_not = None, None
    draws = " and ".join(second.reduced().starts[0].get("draws", ()))
    is_cut = alone.batch.micro_batch != alone.batch.global_batch
    if is_cut and draws:
        why_not = f"{draws} layers draw different random numbers for it"
    elif is_cut:
        whole, why_not = _uncut(alone, root, on_step)
    apart = None
    if whole is not None and _skipped(whole) == _skipped(second):
        apart = cut_difference(
            (_losses(whole), _losses(second)), (read_parameters(whole), read_parameters(second))
        )
    return compare(
        sharded, tuple(run.id for run in (first, second, whole) if run is not None),
        (_losses(first), _losses(second)), (read_parameters(first), read_parameters(second)),
        skipped=_skipped(first), cut_difference=apart, not_uncut_because=why_not,
        mixes_samples=tuple(second.reduced().starts[0].get("mixes_samples", ())),
        loss_note=second.reduced().loss_note,
    )  # fmt: skip


def _uncut(alone: Job, root: str | Path | None, on_step: OnStep | None) -> tuple[Run | None, str | None]:
    """Run a job on one process with the whole batch in one micro-batch; return the run, or the reason why it failed."""
    job = alone.replace(batch=Batch(global_batch=alone.batch.global_batch), name=f"{alone.name} uncut")
    try:
        return _carry_out(job, root, on_step), None
    except LaunchError as error:
        return None, str(error)
    except RunFailed as error:
        if error.rank is None:  # stopped, not too large for the memory
            raise
        return None, str(error.args[0]).rstrip(".")


def _skipped(run: Run) -> int:
    return int(sum(run.reduced().steps.column("skipped")))


def both_jobs(job: Job, steps: int) -> tuple[Job, Job]:
    """Return the job shortened to `steps`, and the same job on one process with the same samples per step.

    The job on one process uses one rank's micro-batch size, so its forward pass needs no more memory than a rank's.

    Raises:
        SpecError: The job already runs on one process, or `steps` is not valid for it.
    """
    require(job, Job, by="check", write="ss.check(ss.Job(...))")
    if job.world_size == 1:
        raise SpecError(
            "strategy='single' is the baseline of every check; check a job with another strategy, such as 'ring'"
        )
    lr_schedule = job.lr_schedule.replace(warmup_steps=min(job.lr_schedule.warmup_steps, steps))
    sharded = job.replace(
        steps=steps, lr_schedule=lr_schedule, checkpoint=Checkpoint(), eval_every=None, elastic=None,
        record=job.record.replace(parameters=True), name=f"check {job.strategy.label} {label_of(job.model)}",
    )  # fmt: skip
    micro = job.batch.micro_batch or gcd(*job.batch.samples(job.num_data_ranks))
    alone = sharded.replace(
        strategy=Strategy("single"), world_size=1, compression=Compression(name="none"),
        batch=Batch(global_batch=job.batch.global_batch, micro_batch=micro),
        record=Record(parameters=True), name=f"check single {label_of(job.model)}",
    )  # fmt: skip
    return sharded, alone


def _carry_out(job: Job, root: str | Path | None, on_step: OnStep | None) -> Run:
    """Launch a job and wait until it has ended. No process is left running, even after an exception."""
    run = launch(job, root=root, made_by="check")
    try:
        while run.is_alive:
            if on_step is not None:
                on_step(run, len(run.reduced().steps))
            time.sleep(_POLL_S)
        run.wait()
    finally:
        run.stop()
    if run.state != "completed":
        raise RunFailed(
            f"run {run.id} was stopped before its last step ({run.reason}); check again",
            rank=None, step=None, strategy=job.strategy.label,
        )  # fmt: skip
    return run


def _losses(run: Run) -> dict[int, float]:
    """Return the loss of each step, averaged over ranks; steps whose loss is NaN are left out."""
    return {step.number: step.loss for step in run.reduced().steps if not math.isnan(step.loss)}


def read_parameters(run: Run) -> dict[str, np.ndarray]:
    """Return all parameters by name after the last step of a run with `Record(parameters=True)`."""
    with np.load(run.path / "parameters.npz", allow_pickle=False) as file:
        return {str(name): file[f"value-{number}"] for number, name in enumerate(file["names"])}
