"""Checking a job: run it sharded, run it on one process, and lay losses and parameters side by side.

Splitting the work must not change what is learned. `check` puts that to the test for any job, with the user's own model
and data: both runs are real, see the same global batches in the same order, and end with all parameters on disk.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from shardscope.errors import RunFailed, SpecError, require
from shardscope.runtime.check_report import CheckReport, compare
from shardscope.runtime.driver import launch
from shardscope.runtime.run import Run
from shardscope.runtime.summary import mean_loss, steps_of
from shardscope.spec import Batch, Checkpoint, Compression, Job, Record, Strategy
from shardscope.spec.user_code import label_of

OnStep = Callable[[Run, int], None]
"""Called with the run that is going on and the steps that all its ranks have finished."""
_POLL_S = 0.1


def check(
    job: Job, steps: int = 8, *, root: str | Path | None = None, on_step: OnStep | None = None
) -> CheckReport:
    """Run a job sharded and on one process, and compare every loss and every parameter. Returns when both have ended.

    Args:
        job: What to check; its number of steps is replaced by `steps`, its checkpoints are left out.
        steps: Optimizer steps of both runs. At least 1.
        root: Folder of the two run directories; None takes ``$SHARDSCOPE_RUNS`` or ``./runs``.
        on_step: Called about ten times a second while a run goes on; what it raises stops the run and the check.

    Raises:
        SpecError: The job is on one process already, or cannot be run for that many steps.
        RunFailed: A rank of one of the two runs failed; names the rank, the step and the strategy. Or somebody stopped
            one of them.

    Example:
        >>> import shardscope as ss
        >>> ss.check(ss.Job(model="mlp", data="digits", strategy="ring"))  # doctest: +SKIP
    """
    sharded, alone = both_jobs(job, steps)
    first, second = _carry_out(sharded, root, on_step), _carry_out(alone, root, on_step)
    return compare(
        sharded, (first.id, second.id), (_losses(first), _losses(second)),
        (read_parameters(first), read_parameters(second)),
        skipped=sum(any(row["skipped"] for row in rows) for rows in steps_of(first.events()).values()),
    )  # fmt: skip


def both_jobs(job: Job, steps: int) -> tuple[Job, Job]:
    """The sharded job for a few steps, and the same on one process with the same samples a step.

    On one process the micro-batch is a rank's, so a forward pass takes no more memory there than on a rank.

    Raises:
        SpecError: The job is on one process already, or `steps` is not possible.
    """
    require(job, Job, by="check", write="ss.check(ss.Job(...))")
    if job.world_size == 1:
        raise SpecError(
            "strategy='single' is what others are checked against; check a strategy such as 'ring'"
        )
    lr_schedule = job.lr_schedule.replace(warmup_steps=min(job.lr_schedule.warmup_steps, steps))
    sharded = job.replace(
        steps=steps, lr_schedule=lr_schedule, checkpoint=Checkpoint(), eval_every=None,
        record=job.record.replace(parameters=True), name=f"check {job.strategy.label} {label_of(job.model)}",
    )  # fmt: skip
    micro = job.batch.micro_batch or job.batch.per_rank(job.num_data_ranks)
    alone = sharded.replace(
        strategy=Strategy("single"), world_size=1, compression=Compression(name="none"),
        batch=Batch(global_batch=job.batch.global_batch, micro_batch=micro),
        record=Record(parameters=True), name=f"check single {label_of(job.model)}",
    )  # fmt: skip
    return sharded, alone


def _carry_out(job: Job, root: str | Path | None, on_step: OnStep | None) -> Run:
    """Launch, follow to the end, and leave nothing running whatever happens."""
    run = launch(job, root=root)
    try:
        while run.is_alive:
            if on_step is not None:
                on_step(run, len(steps_of(run.events())))
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
    """The mean loss over ranks of every step."""
    losses = {step: mean_loss(rows) for step, rows in steps_of(run.events()).items()}
    return {step: loss for step, loss in losses.items() if loss is not None}


def read_parameters(run: Run) -> dict[str, np.ndarray]:
    """All parameters by name after the last step of a run with `Record(parameters=True)`."""
    with np.load(run.path / "parameters.npz", allow_pickle=False) as file:
        return {str(name): file[f"value-{number}"] for number, name in enumerate(file["names"])}
