"""What a study found, in words: who won at which budget, and what did not work."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from shardscope.tuning.apply import branches_of
from shardscope.tuning.definition import Definition
from shardscope.tuning.priors import BASELINES
from shardscope.tuning.records import TrialRecord, front

_LAYERWISE = ("lamb", "lars")


@dataclass(frozen=True)
class OptimizerRow:
    """One optimizer's share of a study."""

    name: str
    trials: int
    best: float | None
    """The lowest value of the first objective; None if no trial was completed."""
    number: int | None
    """Of that trial."""


@dataclass(frozen=True)
class Report:
    """A study's outcome."""

    name: str
    objective: str
    rows: tuple[OptimizerRow, ...]
    """By their best, the best first."""
    front: tuple[TrialRecord, ...]
    states: tuple[tuple[str, int], ...]
    verdict: str

    def __str__(self) -> str:
        counts = ", ".join(f"{number} {state}" for state, number in self.states)
        lines = [f"Study {self.name}: {counts}.", f"Best {self.objective} by optimizer:"]
        for row in self.rows:
            best = "none complete" if row.best is None else f"{row.best:.4g} (trial {row.number})"
            lines.append(f"  {row.name:9} {best}, {row.trials} trials")
        numbers = ", ".join(str(record.number) for record in self.front) or "none yet"
        return "\n".join([*lines, self.verdict, f"On the front: trials {numbers}."])


def report_of(name: str, records: Sequence[TrialRecord], definition: Definition) -> Report:
    """The report of a study's trials so far."""
    objective = definition.objectives[0]
    own = branches_of(definition.job)["optimizer"]
    rows = _rows(records, objective, own)
    states = Counter(record.state for record in records if record.counted or record.state == "impossible")
    return Report(
        name, objective, rows, tuple(front(records)), tuple(sorted(states.items())), _verdict(rows, objective)
    )


def _rows(records: Sequence[TrialRecord], objective: str, own: str) -> tuple[OptimizerRow, ...]:
    groups: dict[str, list[TrialRecord]] = {}
    for record in records:
        if record.counted and record.state != "waiting":
            groups.setdefault(str(record.params.get("optimizer", own)), []).append(record)
    rows = [_row(name, group, objective) for name, group in groups.items()]
    return tuple(sorted(rows, key=lambda row: (row.best is None, row.best or 0.0)))


def _row(name: str, group: Sequence[TrialRecord], objective: str) -> OptimizerRow:
    done = [(record.values[objective], record.number) for record in group if record.values is not None]
    best, number = min(done) if done else (None, None)
    return OptimizerRow(name, len(group), best, number)


def _verdict(rows: Sequence[OptimizerRow], objective: str) -> str:
    """Whether a baseline won, against whom, and whether the budgets were equal."""
    done = [row for row in rows if row.best is not None]
    if not done:
        return "No trial is complete, so nothing has won."
    best = done[0]
    if len(rows) < 2:
        return f"Only {best.name} was tried, so it is compared with nothing."
    counts = {row.trials for row in rows}
    budget = "at equal budget" if max(counts) - min(counts) <= 1 else "at budgets that were not equal"
    if best.name in BASELINES:
        beaten = [row for row in done[1:] if row.name in _LAYERWISE]
        against = ", ".join(f"{row.name} ({row.best:.4g})" for row in beaten) or "the others"
        return f"The baseline {best.name} has the lowest {objective}, {best.best:.4g}, {budget}: lower than {against}."
    baselines = [row for row in done[1:] if row.name in BASELINES]
    against = (
        ", ".join(f"{row.name} ({row.best:.4g})" for row in baselines)
        or "the others; no baseline is complete"
    )
    return f"{best.name} has the lowest {objective}, {best.best:.4g}, {budget}: lower than {against}."
