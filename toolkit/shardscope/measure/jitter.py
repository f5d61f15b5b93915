"""The entry point `shardscope.jitter`: variation of the computing times of a run, extrapolated to many more
ranks.
"""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from shardscope._experimental import experimental
from shardscope.analytic.stragglers import Floats, Jitter, jitter_of
from shardscope.errors import RunUnreadable, SpecError
from shardscope.runlog.schema import Event
from shardscope.runlog.spans import finished_steps, phase_seconds
from shardscope.runlog.steps import WARM_UP_STEPS
from shardscope.runtime import Run

_PASSES = ("forward", "backward")
_FEWEST = 2


@experimental
def jitter(
    run: Run | str | Path, *, ranks: Sequence[int] | None = None, root: str | Path | None = None
) -> Jitter:
    """Return how the computing times of a run's ranks differ, between ranks and from step to step.

    The result predicts the computing time of the slowest of any number of ranks, for which synchronous ranks wait: the
    expected maximum of log-normal times with the variance of the measured ranks (`Jitter.slowest_s`). This assumes
    that further ranks behave like the measured ones. Ranks that share cores have more jitter than ranks with a core of
    their own; a warning says so. Steps that were repeated after a failure, or in which a fault slowed a rank down, are
    left out.

    Args:
        run: A run of at least 2 ranks that compute, with recorded spans, or its name or path.
        ranks: Ranks to use, for example to check how well some ranks predict the slowest of all; None for all
            ranks that compute.
        root: Folder of the runs; None uses ``$SHARDSCOPE_RUNS`` or ``./runs``.

    Example:
        >>> run = ss.launch(ss.Job(model="mlp", data="digits", strategy="ring", world_size=8)).wait()  # doctest: +SKIP
        >>> ss.jitter(run).slowdown([8, 4096])  # doctest: +SKIP

    Raises:
        RunNotFound: The run does not exist.
        RunUnreadable: The run has too few finished steps with recorded spans, or too few ranks that compute.
        SpecError: Fewer than 2 ranks are given, or one does not compute.
    """
    run = Run.attach(run, root)
    columns = computing_times(run)
    own = [*columns] if ranks is None else [*dict.fromkeys(ranks)]
    unknown = [rank for rank in own if rank not in columns]
    if len(own) < _FEWEST or unknown:
        raise SpecError(
            f"ranks={ranks!r} is not valid; give at least 2 of the ranks that compute, which are "
            f"{', '.join(map(str, columns))}"
        )
    _warn_of_shared_cores(run)
    return jitter_of(np.stack([columns[rank] for rank in own], axis=1))


def computing_times(run: Run) -> dict[int, Floats]:
    """Return the computing time of each rank that computes, in seconds, in each step that nothing disturbed.

    Raises:
        RunUnreadable: The run has too few finished steps with recorded spans, or too few ranks that compute.
    """
    table = np.array([[_passes_s(event) for event in row] for row in _undisturbed(run)])
    computing = np.flatnonzero((table > 0).all(axis=0)).tolist() if len(table) else []
    if len(table) < _FEWEST or len(computing) < _FEWEST:
        raise RunUnreadable(
            f"run {run.id} has {len(table)} finished steps with recorded spans after its first {WARM_UP_STEPS}, "
            "without those that were repeated or slowed down by a fault, and "
            f"{len(computing)} ranks that compute in each; at least 2 of each are needed"
        )
    return {rank: table[:, rank] for rank in computing}


def _undisturbed(run: Run) -> list[list[Event]]:
    """Return the step events of all ranks with spans, after warm-up, without repeated steps and slow faults."""
    events = run.events()
    counts = Counter((event["rank"], event["step"]) for event in events if event["event"] == "step")
    repeated = {step for (_, step), count in counts.items() if count > 1}
    steps = finished_steps(events, run.job.world_size).items()
    recorded = [(step, row) for step, row in steps if all(event.get("spans") for event in row)]
    return [
        row for step, row in recorded[WARM_UP_STEPS:] if step not in repeated and not run.faults.slows(step)
    ]


def _warn_of_shared_cores(run: Run) -> None:
    """Warn if ranks that really compute outnumber the cores of the machine on which they ran."""
    ranks, cluster, provenance = run.world_size, run.cluster, run.provenance
    if provenance is None or (cluster is not None and cluster.flops is not None):  # emulated processors sleep
        return
    cores, on_gpus = provenance.machine["cores"], run.job.device != "cpu" and provenance.machine["gpus"]
    if not on_gpus and ranks > cores:
        warnings.warn(
            f"{ranks} ranks of run {run.id} shared {cores:g} cores, so most of this jitter is waiting for a core; "
            "measure with at most one rank per core",
            stacklevel=3,
        )


def _passes_s(event: Event) -> float:
    phases = phase_seconds(event["spans"], event.get("waited"))
    return sum(phases.get(name, 0.0) for name in _PASSES)
