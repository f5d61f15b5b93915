"""Text report of a study: the best optimizer, the number of trials per optimizer, and alarms about layers."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from shardscope.spec import Optimizer, registry
from shardscope.spec.units import plural
from shardscope.tuning.apply import branches_of
from shardscope.tuning.definition import Definition
from shardscope.tuning.front import note_of
from shardscope.tuning.priors import BASELINES
from shardscope.tuning.records import NOT_BEGUN, TrialRecord, front

_MOST_ALARMS = 5
"""Maximum number of alarms that are printed; `StudyReport.alarms` has all of them."""


@dataclass(frozen=True)
class OptimizerRow:
    """Results of one optimizer in a study."""

    name: str
    trials: int
    best: float | None
    """Lowest value of the first objective; None if no trial completed."""
    number: int | None
    """Number of the trial with that value."""


@dataclass(frozen=True)
class StudyReport:
    """Results of a study; `str` gives them as text."""

    name: str
    objective: str
    rows: tuple[OptimizerRow, ...]
    """Rows sorted by best value, lowest first."""
    front: tuple[TrialRecord, ...]
    """Pareto-optimal complete trials, except the trials in `by_noise`."""
    states: tuple[tuple[str, int], ...]
    """Number of trials in each state, as (state, number)."""
    verdict: str
    """Sentence that names the best optimizer and the optimizers that it beats."""
    samplers: tuple[tuple[str, int], ...] = ()
    """Number of trials for which each sampler chose settings, as (name, number); fully fixed trials are excluded."""
    batches: str | None = None
    """Sentence on which batch sizes are searched and why; None if the study did not choose them."""
    alarms: tuple[tuple[int, str], ...] = ()
    """Alarms about layers, as (trial number, sentence)."""
    test: str | None = None
    """Sentence with the best trial's results on the test split, on which no decision is based; None if unknown."""
    by_noise: tuple[int, ...] = ()
    """Numbers of the trials that are on the front only because of noise in measured times (`tuning.front`)."""

    def __str__(self) -> str:
        counts = ", ".join(f"{number} {state}" for state, number in self.states)
        about = [] if self.batches is None else [self.batches]
        lines = [f"Study {self.name}: {counts}.", *about, f"Best {self.objective} by optimizer:"]
        for row in self.rows:
            best = "none complete" if row.best is None else f"{row.best:.4g} (trial {row.number})"
            lines.append(f"  {row.name:9} {best}, {row.trials} trials")
        numbers = ", ".join(str(record.number) for record in self.front) or "none yet"
        if self.samplers:
            told = ", ".join(f"{plural(count, 'trial')} by {name}" for name, count in self.samplers)
            lines.append(f"Drawn by a sampler: {told}.")
        note = note_of(self.by_noise)
        left_out = [text for text in (self.test, note) if text is not None]
        return "\n".join([
            *lines, self.verdict, f"On the Pareto front: trials {numbers}.", *left_out, *self._alarm_lines()
        ])  # fmt: skip

    def _alarm_lines(self) -> list[str]:
        """Return one line per alarm, trials on the front first; after `_MOST_ALARMS`, a line counts the others."""
        front = {record.number for record in self.front}
        rows = sorted(self.alarms, key=lambda row: (row[0] not in front, row[0]))
        lines = [f"Alarm in trial {number}: {text}." for number, text in rows[:_MOST_ALARMS]]
        more = len(rows) - len(lines)
        return [*lines, f"And {more} more, in StudyReport.alarms."] if more else lines


def report_of(name: str, records: Sequence[TrialRecord], definition: Definition) -> StudyReport:
    """Return the report on a study's trials so far.

    Args:
        name: Name of the study.
        records: Records of its trials.
        definition: Definition of the study.
    """
    objective = definition.objectives[0]
    own = branches_of(definition.job)["optimizer"]
    rows = _rows(records, objective, own)
    states = Counter(record.state for record in records if record.counted or record.state == "impossible")
    drew = Counter(record.sampler for record in records if record.counted and record.sampler is not None)
    clear, by_noise = front(records)
    alarms = tuple((record.number, text) for record in records for text in record.alarms)
    return StudyReport(
        name, objective, rows, tuple(record for record in records if record.number in clear),
        tuple(sorted(states.items())), _verdict(rows, objective), tuple(drew.items()), definition.batches, alarms,
        _test(rows, records), by_noise,
    )  # fmt: skip


def _test(rows: Sequence[OptimizerRow], records: Sequence[TrialRecord]) -> str | None:
    """Return a sentence with the best trial's result on the test split, evaluated once, after the last step."""
    best = next((record for record in records if rows and record.number == rows[0].number), None)
    if best is None or best.measured is None or best.measured.test is None:
        return None
    loss, error = best.measured.test
    wrong = "" if math.isnan(error) else f", error {error:.4g}"
    return f"On the test split, on which no choice was based, trial {best.number} has loss {loss:.4g}{wrong}."


def _rows(records: Sequence[TrialRecord], objective: str, own: str) -> tuple[OptimizerRow, ...]:
    groups: dict[str, list[TrialRecord]] = {}
    for record in records:
        if record.counted and record.state not in NOT_BEGUN:
            groups.setdefault(str(record.params.get("optimizer", own)), []).append(record)
    rows = [_row(name, group, objective) for name, group in groups.items()]
    return tuple(sorted(rows, key=lambda row: (row.best is None, row.best or 0.0)))


def _row(name: str, group: Sequence[TrialRecord], objective: str) -> OptimizerRow:
    done = [(record.values[objective], record.number) for record in group if record.values is not None]
    best, number = min(done) if done else (None, None)
    return OptimizerRow(name, len(group), best, number)


def _is_layerwise(name: str) -> bool:
    optimizer = registry.find(Optimizer, name)
    return optimizer is not None and optimizer.is_layerwise()


def _verdict(rows: Sequence[OptimizerRow], objective: str) -> str:
    """Return a sentence that names the best optimizer, the optimizers it beats, and the number of trials of each."""
    done = [row for row in rows if row.best is not None]
    if not done:
        return "No trial is complete, so no optimizer has won."
    best = done[0]
    if len(rows) < 2:
        return (
            f"Only {best.name} was tried: its lowest {objective} is {best.best:.4g}, in trial {best.number}."
        )
    least, most = min(row.trials for row in rows), max(row.trials for row in rows)
    budget = f"with {least} to {most} trials each" if most > least else f"with {plural(least, 'trial')} each"
    if most - least > 1:
        budget += " (unequal budgets)"
    if best.name in BASELINES:
        beaten = [row for row in done[1:] if _is_layerwise(row.name)]
        against = ", ".join(f"{row.name} ({row.best:.4g})" for row in beaten) or "the others"
        return f"The baseline {best.name} has the lowest {objective}, {best.best:.4g}, {budget}: lower than {against}."
    baselines = [row for row in done[1:] if row.name in BASELINES]
    against = (
        ", ".join(f"{row.name} ({row.best:.4g})" for row in baselines)
        or "the others; no baseline is complete"
    )
    return f"{best.name} has the lowest {objective}, {best.best:.4g}, {budget}: lower than {against}."
