"""Explain where a run spends its time, and suggest a change of its job."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from statistics import fmean, median
from typing import Any

import numpy as np

from shardscope.errors import RunUnreadable
from shardscope.machine import usable_cores
from shardscope.measure.compare.measured import (
    COMMUNICATION,
    Steps,
    counted,
    parts_by_rank,
    slowest_rank_s,
    warmed_up,
    with_spans,
)
from shardscope.measure.explain import words
from shardscope.measure.explain.changes import Predictor, best_change, untried_change
from shardscope.measure.explain.losses import DATA, Cause, Loss, MeasuredStep, computing_s, losses
from shardscope.measure.pipeline_waits import pipeline_waits
from shardscope.methods.strategies.pipeline import with_split
from shardscope.prediction.job import JobPrediction
from shardscope.runlog.schema import OBSERVING, Event
from shardscope.runlog.spans import covered, finished_steps
from shardscope.runlog.stragglers import Circumstances, Phases, computed_phases
from shardscope.runtime import Run
from shardscope.runtime.launcher.preflight import preflight
from shardscope.runtime.record.launch_prediction import constants_of
from shardscope.show import Part, Sentences, Shown, Table
from shardscope.spec import Job

_LANES = ("compute", COMMUNICATION)
LEAST_LOSS = 0.1
"""Smallest loss, as a fraction of the step, that is worth a change."""


@dataclass(frozen=True, repr=False)
class Explanation(Shown):
    """Where a run spends its time, as returned by `explain`.

    Attributes:
        sentence: The largest loss of time with its cause, and the change that is predicted to reduce it.
        cause: The cause of the largest loss; ``none`` if no loss is worth a change.
        share: The largest loss as a fraction of the step, 0 to 1, as measured.
        change: Fields of the job to change, for ``run.job.replace(**change)``; None if no change is known to help.
        expected: Predicted samples per second after the change, relative to the run's job; None without a change, or
            if its effect is not predicted.
        losses: All losses, largest first.
    """

    sentence: str
    cause: Cause
    share: float
    change: Mapping[str, Any] | None
    expected: float | None
    losses: tuple[Loss, ...] = ()

    def _shown(self) -> list[Part]:
        rows = [[loss.cause, f"{loss.share:.1%}", str(loss.rank)] for loss in self.losses]
        return [
            Sentences([self.sentence], is_titled=False),
            Table(["loss of time", "share of the step", "rank"], rows),
        ]


def explain(run: Run | str | Path, *, root: str | Path | None = None) -> Explanation:
    """Name the largest loss of time in the steps of a run, its cause, and a change of the job that reduces it.

    Times are medians over the newest steps with recorded spans. The change is the one with the largest predicted gain,
    or a milder one with nearly the same gain. A run that has not ended is explained up to its newest step.

    Args:
        run: A run with at least one finished step with recorded spans, or its name or path.
        root: Folder of the runs; None uses ``$SHARDSCOPE_RUNS`` or ``./runs``.

    Raises:
        RunNotFound: The run does not exist.
        RunUnreadable: The run cannot be read, or no step with recorded spans has been finished by all ranks.

    Example:
        >>> run = ss.launch(ss.Job(model="mlp", data="digits", strategy="ring", world_size=2)).wait()  # doctest: +SKIP
        >>> found = ss.explain(run)  # doctest: +SKIP
        >>> faster = ss.launch(run.job.replace(**found.change))  # doctest: +SKIP
    """
    run = Run.attach(run, root)
    return explain_events(run, run.events())


def explain_events(run: Run, events: Sequence[Event]) -> Explanation:
    """Explain a run from its newest events; see `explain`."""
    job, launched = run.resized_job, constants_of(run)

    def predict(changed: Job) -> JobPrediction | None:
        return preflight(_on_same_split(run, changed), run.cluster, launched=launched).prediction

    step = measured_step(events, job, predict(job), cores=_cores(run))
    if step is None:
        raise RunUnreadable(f"run {run.id} has no finished step with recorded spans yet; wait for a step")
    found = explanation(step, job, predict, cores=_cores(run))
    return replace(found, change=None if found.change is None else _launched_change(run, job, found.change))


def _on_same_split(run: Run, changed: Job) -> Job:
    """Return a changed job with the split that the run's ranks measured, unless it has another strategy.

    A change is predicted and launched with it: another measurement could give another split, and thus other steps.
    """
    return with_split(changed, run.reduced().split) if changed.strategy == run.job.strategy else changed


def _launched_change(run: Run, job: Job, change: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a change of a run's job with the split that its prediction has."""
    changed = job.replace(**change, name=None)
    same = _on_same_split(run, changed)
    return change if same is changed else {**change, "strategy": same.strategy}


def _cores(run: Run) -> float:
    """Return the cores that the run could use, as recorded at its launch; this machine's cores if unknown."""
    cores = run.provenance.machine.get("cores") if run.provenance is not None else None
    return float(cores) if isinstance(cores, int | float) else usable_cores()


def explanation(step: MeasuredStep, job: Job, predict: Predictor, *, cores: float) -> Explanation:
    """Return the explanation of a measured step.

    Args:
        step: The step.
        job: The run's job.
        predict: Function that predicts a job, or returns None.
        cores: Number of CPU cores of this machine.
    """
    found = tuple(losses(step))
    worst = found[0] if found else Loss("none", 0.0, 0)
    if worst.share < LEAST_LOSS:
        share = fmean(map(computing_s, step.parts)) / step.seconds
        return Explanation(words.nothing(share), "none", worst.share, None, None, found)
    remedy = best_change(worst.cause, job, predict, cores=int(cores))
    change = untried_change(worst.cause, job) if remedy is None else remedy.change
    advice = (
        words.remedy_text(worst, remedy, job)
        if remedy or not change
        else words.untried_text(worst, change, job)
    )
    sentence = f"{words.loss_text(found, step, job, cores=int(cores))} {advice}"
    return Explanation(
        sentence, worst.cause, worst.share, change, None if remedy is None else remedy.speed_up, found
    )


def second_remedy(run: Run, found: Explanation) -> tuple[str, Mapping[str, Any]] | None:
    """Return a sentence on the largest other loss that a change may reduce, and the change; None if there is none."""
    for loss in found.losses[1:]:
        change = untried_change(loss.cause, run.job) if loss.share >= LEAST_LOSS else None
        if change is not None:
            return words.second_text(found.losses, loss, change, run.job), _launched_change(
                run, run.job, change
            )
    return None


def measured_step(
    events: Sequence[Event], job: Job, prediction: JobPrediction | None, *, cores: float | None = None
) -> MeasuredStep | None:
    """Return a typical step of a run; None until a step with recorded spans has been finished by all ranks.

    Args:
        events: The run's events.
        job: The run's job.
        prediction: Prediction of the job; None if there is none.
        cores: Number of cores of the machine on which it ran; None to use this machine's number.
    """
    steps, period = finished_steps(events, job.world_size), job.compression.period
    shown = with_spans(steps, period)
    seconds = slowest_rank_s({number: steps[number] for number in shown}, period) if shown else None
    if not seconds:
        return None
    late = warmed_up({number: steps[number] for number in shown})
    ranks, phases = range(job.world_size), Phases()
    roles = {rank: job.strategy.role(rank, job.world_size) for rank in ranks}
    for number, row in steps.items():
        phases.take(number, row)
    named = phases.straggler(roles, Circumstances(job))
    return MeasuredStep(
        seconds=seconds,
        parts=parts_by_rank(steps, shown, period),
        computed=[_median(_computed_s([steps[number][rank] for number in late])) for rank in ranks],
        waiting=median(_waiting_s(steps[number]) for number in late),
        sent_bytes=_sent(steps, late, job.world_size),
        hidden=[median(_hidden_s(steps[number][rank]) for number in late) for rank in ranks],
        roles=[*roles.values()],
        shares_cores=job.world_size * job.threads > (usable_cores() if cores is None else cores),
        predicted=None if prediction is None else prediction.time,
        pipeline=pipeline_waits(events, job),
        cluster="" if prediction is None or prediction.emulated is None else prediction.emulated.name,
        straggler=None if named is None or named.phase == DATA else named,
    )


def _waiting_s(row: Sequence[Event]) -> float:
    """Return how much longer the slowest rank computes in one step than the ranks do on average, in seconds."""
    seconds = _computed_s(row)
    return max(seconds) - fmean(seconds)


def _computed_s(events: Sequence[Event]) -> list[float]:
    """Return the time of computing in each event with a gradient, without reading data, in seconds."""
    phases = [computed_phases(event) for event in events if event.get("gradients", 1)]
    return [sum(each.values()) - each.get(DATA, 0.0) for each in phases]


def _median(values: Sequence[float]) -> float:
    """Return the median; 0 for a rank that computes no gradients."""
    return median(values) if values else 0.0


def _hidden_s(event: Event) -> float:
    """Return the time for which a rank communicates and also computes in one step, in seconds."""
    lanes = {name: [(row[2], row[3]) for row in event["spans"] if row[0] == name] for name in _LANES}
    return sum(map(covered, lanes.values())) - covered([*chain(*lanes.values())])


def _sent(steps: Steps, numbers: Sequence[int], world_size: int) -> list[float]:
    found = counted([steps[number] for number in numbers], world_size)
    counts = [each.bytes for name, each in found.items() if name not in OBSERVING]
    total = sum(counts, start=np.zeros(world_size))
    return [float(each) / len(numbers) for each in total]
