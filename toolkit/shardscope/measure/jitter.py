"""The entry point `shardscope.jitter`: how computing times of a run differ, and what that means for far more ranks."""

from __future__ import annotations

from pathlib import Path

from shardscope.analytic.stragglers import Jitter, jitter_of
from shardscope.errors import RunUnreadable
from shardscope.runlog.schema import Event
from shardscope.runlog.spans import finished_with_spans, phase_seconds
from shardscope.runlog.steps import WARM_UP_STEPS
from shardscope.runtime import Run

_PASSES = ("forward", "backward")
_FEWEST = 2


def jitter(run: Run | str | Path, *, root: str | Path | None = None) -> Jitter:
    """Return how the computing times of a run's ranks differ, between ranks and from step to step.

    The result predicts the time of the slowest of any number of ranks, which ranks that meet in each step wait for: as
    the expected maximum of log-normal times, with the variance of the measured ranks (`Jitter.slowest_s`). It holds as
    far as further ranks are like the measured ones; ranks that share cores have more jitter than ranks on their own.

    Args:
        run: A run of at least 2 ranks that compute, with recorded spans, or its name or path.
        root: Folder of the runs; None takes ``$SHARDSCOPE_RUNS`` or ``./runs``.

    Example:
        >>> run = ss.launch(ss.Job(model="mlp", data="digits", strategy="ring", world_size=8)).wait()  # doctest: +SKIP
        >>> ss.jitter(run).slowdown([8, 4096])  # doctest: +SKIP

    Raises:
        RunNotFound: The run does not exist.
        RunUnreadable: The run has too few finished steps with recorded spans, or too few ranks that compute.
    """
    if isinstance(run, str | Path):
        run = Run.attach(run, root)
    rows = finished_with_spans(run.events(), run.job.world_size)[WARM_UP_STEPS:]
    table = [[_passes_s(event) for event in row] for row in rows]
    computing = [rank for rank in range(run.job.world_size) if table and all(row[rank] > 0 for row in table)]
    if len(table) < _FEWEST or len(computing) < _FEWEST:
        raise RunUnreadable(
            f"run {run.id} has {len(table)} finished steps with recorded spans after its first {WARM_UP_STEPS}, and "
            f"{len(computing)} ranks that compute in each; at least 2 of each are needed"
        )
    return jitter_of([[row[rank] for rank in computing] for row in table])


def _passes_s(event: Event) -> float:
    phases = phase_seconds(event["spans"], event.get("waited"))
    return sum(phases.get(name, 0.0) for name in _PASSES)
