"""`ss.tune`: search the settings of a job by real runs."""

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
from shardscope.spec import Job
from shardscope.spec.space import Space
from shardscope.tuning.driver import Pruner
from shardscope.tuning.measured import Objective
from shardscope.tuning.noise_probe import BatchesAround
from shardscope.tuning.progress import StudyProgress, is_watched, measuring_text
from shardscope.tuning.pruning.halving import Rungs
from shardscope.tuning.session import Session


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
    on_tick: Callable[[Session], None] | None = None,
    progress: bool | None = None,
) -> optuna.Study:
    """Search the settings of a job; every trial is a real run on this machine's ranks.

    Waits until the study has its trials. An interrupt stops it; called again with the same name it goes on, and trials
    that were running then are run first. Several drivers, on one machine or many, can call it at once on one storage.

    Args:
        job: What to train; None goes on with the study called `name` as it was begun.
        space: What may change, and between what; None takes what suits the job.
        trials: That the study is to have in all; None is what it was begun with, for a new one 40.
        objectives: What to minimise: ``loss``, ``error``, ``seconds``, ``bytes``, ``memory`` (what each is and in which
            unit, says `tuning.objectives`), or functions of yours, as ``{"loss": None, "mine": f}`` with ``f(run)`` a
            number. By default loss, seconds and bytes.
        name: Of the study; by default model and strategy.
        storage: An Optuna storage or its URL, for many machines; None keeps a journal beside the runs.
        sampler: ``auto`` draws by TPE, and by a Gaussian process once a trial takes half a minute and more, which each
            trial's attribute ``sampler`` and the report say; or ``tpe``, ``gp``, ``qmc``, ``nsga``, ``cma-es`` (not in
            a storage that is shared), ``random``, or one of Optuna's.
        pruner: ``dominance``, ``none``, or for one objective Optuna's ``median``, ``percentile``, ``hyperband``,
            ``successive-halving``, ``patient``, or an object of Optuna's; by default dominance for several objectives,
            median for one.
        promote: Train every trial for a ninth of its samples, and the best fraction for that many times more, from
            its checkpoint, until the best of all have ended (asynchronous successive halving). `Rungs` has the shares.
        parallel: Trials at once in this process.
        equal: Trials of another batch size keep the job's ``samples`` (so its epochs) or its ``steps``.
        baselines: Where the space chooses optimizers, have AdamW and Nesterov's SGD among them, give each the same
            number of trials, and run the job as it is and settings from the literature first.
        memory_limit: Bytes that a rank may hold; trials that would hold more, by formula, cost no run. None is a rank's
            share of the machine's free memory.
        timeout_s: Stop after this many seconds; the study can go on later.
        seed: Of the sampler.
        root: Folder of the runs and studies; None takes ``$SHARDSCOPE_RUNS`` or ``./runs``.
        batch_range: Where `space` is left out, what the batches lie around: the ``noise`` scale, which the job's first
            steps measure in a run before the first trial, or the ``job``'s own batch, which always lies within them.
            A study keeps its range when it goes on; its report says what it is, and why.
        on_tick: Called many times a second with the session.
        progress: Print a line for every trial that has ended, as ``shardscope tune`` does; False is silent. None
            prints where somebody sees it: in a terminal and in a notebook.

    Raises:
        SpecError: The space or an objective is impossible.
        StudyError: The storage does not answer, or holds another study of this name; or the time was over before the
            noise scale was measured, and no study has begun.

    Example:
        >>> import shardscope as ss
        >>> job = ss.Job(model="mlp", data="digits", strategy="ring", steps=50)
        >>> study = ss.tune(job, {"optimizer.lr": (1e-4, 1e-1, "log")}, trials=20)  # doctest: +SKIP
    """
    began = time.monotonic()
    is_told = is_watched() if progress is None else progress
    with set_after(timeout_s) as stopping:
        session = Session.open(
            job, space, trials=trials, objectives=objectives, name=name, storage=storage, sampler=sampler,
            pruner=pruner, promote=promote, parallel=parallel, equal=equal, baselines=baselines,
            memory_limit=memory_limit, seed=seed, root=root, batch_range=batch_range, stopping=stopping,
            on_probe=_say_measuring if is_told else None,
        )  # fmt: skip
    told = StudyProgress(session, stream=sys.stdout) if is_told else None
    left_s = None if timeout_s is None else timeout_s - (time.monotonic() - began)

    def tick(session: Session) -> None:
        if told is not None:
            told.draw()
        if on_tick is not None:
            on_tick(session)

    with told or nullcontext():
        session.run(timeout_s=left_s, on_tick=tick)
    return session.study


@contextmanager
def set_after(seconds: float | None) -> Iterator[threading.Event]:
    """An event that is set after so long, if this has not been left by then; None never sets it.

    Raises:
        SpecError: It is not a time limit.
    """
    if seconds is not None and not (isinstance(seconds, int | float) and seconds > 0):
        raise SpecError(
            f"timeout_s={quoted(seconds)} is not a time limit; "
            "give seconds above 0, or leave it out to work to the end"
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


def _say_measuring(probe: Job) -> None:
    print(measuring_text(probe), flush=True)
