"""`ss.tune`: search for the best settings of a job with real runs."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any, Literal

import optuna
from optuna.pruners import BasePruner
from optuna.samplers import BaseSampler
from optuna.storages import BaseStorage

from shardscope.errors import SpecError, quoted
from shardscope.runtime.record.bar import is_watched
from shardscope.spec import Job
from shardscope.spec.space import Space
from shardscope.tuning.driver import Pruner
from shardscope.tuning.measured import Objective
from shardscope.tuning.noise_probe import BatchesAround
from shardscope.tuning.progress import StudyProgress, measuring_text
from shardscope.tuning.pruning.halving import Rungs
from shardscope.tuning.session import StudySession


def tune(
    job: Job | None = None,
    space: Space | Mapping[str, Any] | None = None,
    *,
    trials: int | None = None,
    objectives: Sequence[str] | Mapping[str, Objective | None] | None = None,
    name: str | None = None,
    storage: str | BaseStorage | None = None,
    sampler: str | BaseSampler = "auto",
    pruner: str | BasePruner | Pruner | None = None,
    promote: int | Rungs | None = None,
    parallel: int = 1,
    equal: Literal["samples", "steps"] = "samples",
    baselines: bool = True,
    memory_limit: float | None = None,
    timeout_s: float | None = None,
    seed: int = 0,
    root: str | Path | None = None,
    batch_range: BatchesAround = "noise",
    on_tick: Callable[[StudySession], None] | None = None,
    progress: bool | None = None,
) -> optuna.Study:
    """Search for the best settings of a job; every trial is a real run on this machine's ranks.

    Blocks until the study has its trials. An interrupt stops the study. A later call with the same name resumes it and
    first reruns the trials that were interrupted. Several drivers, on one machine or many, can share one storage.

    Args:
        job: What to train; None resumes the study called `name` with its original job.
        space: Search space: the settings that may change, with their ranges; None uses a default space for the job.
        trials: Total number of trials of the study; None keeps an existing study's number, and uses 40 for a new study.
        objectives: What to minimise: ``loss``, ``error``, ``seconds``, ``bytes``, ``memory`` (meanings and units are in
            `tuning.objectives`), or your own functions, as ``{"loss": None, "mine": f}`` where ``f(run)`` returns a
            number that must not depend on the test split. Default: loss, seconds and bytes.
        name: Name of the study; model and strategy by default.
        storage: An Optuna storage or its URL, for several machines; None keeps a journal file next to the runs.
        sampler: ``auto`` (TPE, and a Gaussian process once trials take half a minute or more), ``tpe``, ``gp``,
            ``qmc``, ``nsga``, ``cma-es`` (not in a shared storage), ``random``, or an Optuna sampler. The report, and
            each trial's attribute ``sampler``, name the sampler that was used.
        pruner: ``dominance``, ``none``, or for one objective Optuna's ``median``, ``percentile``, ``hyperband``,
            ``successive-halving``, ``patient``, or an Optuna pruner; by default dominance for several objectives and
            median for one.
        promote: Reduction factor of asynchronous successive halving. Every trial trains on 1/9 of its samples. The best
            1/`promote` of the trials then resume from their checkpoints and train on `promote` times as many samples,
            and so on up to the full run. Pass `Rungs` for other fractions.
        parallel: Number of trials that this process runs at the same time.
        equal: Whether a trial with a different batch size trains on as many ``samples`` as the job (and so for as many
            epochs), or for as many ``steps``.
        baselines: Run the unchanged job, baselines and settings from the literature first; and if the space contains
            optimizers, give each the same number of trials. Baselines are AdamW and SGD with Nesterov momentum, each
            at its usual learning rate. A baseline that the space does not contain gets only that trial. False leaves
            every trial to the sampler.
        memory_limit: Memory that each rank may use, in bytes; trials that are predicted to need more are not run. None
            divides the machine's free memory equally among the ranks.
        timeout_s: Stop after this many seconds; the study can be resumed later. None sets no limit.
        seed: Seed of the sampler.
        root: Folder for runs and studies; None uses ``$SHARDSCOPE_RUNS`` or ``./runs``.
        batch_range: Centre of the batch sizes if `space` is omitted. ``noise`` uses the critical batch size from the
            gradient noise scale, which a run before the first trial measures over the job's first steps; ``job`` uses
            the job's batch size. The range always includes the job's batch size. A resumed study keeps its range; its
            report states the range and the reason.
        on_tick: Called with the session many times a second.
        progress: Whether to print a line for every finished trial, as ``shardscope tune`` does. None prints in a
            terminal and in a notebook only.

    Raises:
        SpecError: The space or an objective is invalid.
        StudyError: The storage is unreachable or holds a different study with this name, or the time ran out before
            the noise scale was measured, so that no study was created.

    Example:
        >>> import shardscope as ss
        >>> job = ss.Job(model="mlp", data="digits", strategy="ring", steps=50)
        >>> study = ss.tune(job, {"optimizer.lr": (1e-4, 1e-1, "log")}, trials=20)  # doctest: +SKIP
    """
    began = time.monotonic()
    is_told = is_watched() if progress is None else progress
    with set_after(timeout_s) as stopping:
        session = StudySession.open(
            job, space, trials=trials, objectives=objectives, name=name, storage=storage, sampler=sampler,
            pruner=pruner, promote=promote, parallel=parallel, equal=equal, baselines=baselines,
            memory_limit=memory_limit, seed=seed, root=root, batch_range=batch_range, stopping=stopping,
            on_probe=_print_measuring if is_told else None,
        )  # fmt: skip
    told = StudyProgress(session, stream=sys.stdout) if is_told else None
    left_s = None if timeout_s is None else timeout_s - (time.monotonic() - began)

    def tick(session: StudySession) -> None:
        if told is not None:
            told.draw()
        if on_tick is not None:
            on_tick(session)

    with told or nullcontext():
        session.run(timeout_s=left_s, on_tick=tick)
    return session.study


@contextmanager
def set_after(seconds: float | None) -> Iterator[threading.Event]:
    """Yield an event that is set after `seconds`, unless the context has exited by then; None never sets it.

    Raises:
        SpecError: `seconds` is not a time limit.
    """
    if seconds is not None and not (isinstance(seconds, int | float) and seconds > 0):
        raise SpecError(
            f"timeout_s={quoted(seconds)} is not a time limit; "
            "give seconds above 0, or leave it out to run until the study is complete"
        )
    event = threading.Event()
    timer = None if seconds is None else threading.Timer(min(seconds, threading.TIMEOUT_MAX), event.set)
    if timer is not None:
        timer.daemon = True
        timer.start()
    try:
        yield event
    finally:
        if timer is not None:
            timer.cancel()


def _print_measuring(probe: Job) -> None:
    print(measuring_text(probe), flush=True)
