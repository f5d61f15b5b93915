"""The trials of a study in the form that its figures read: settings, known objective values and progress."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from shardscope.spec.space import Value
from shardscope.tuning.front import front_of
from shardscope.tuning.measured import TrialMetrics
from shardscope.tuning.objectives import OBJECTIVES, QUALITIES
from shardscope.tuning.pruning.outlook import improvement
from shardscope.tuning.records import TrialRecord
from shardscope_widgets.words import bytes_text, duration_text, three_digits

if TYPE_CHECKING:
    from collections.abc import Collection

Curve = tuple[tuple[int, float, float], ...]
TITLES = {
    "loss": "validation loss",
    "error": "validation error, fraction of wrong answers",
    "seconds": "seconds of training",
    "bytes": "bytes sent by all ranks",
    "memory": "peak memory per rank, bytes",
    "trial": "trials in order of start",
}
"""Axis titles of the built-in objectives."""
ORDER = "trial"
"""Name used in place of an objective for an x-axis with trials in the order in which they started."""


@dataclass(frozen=True)
class TrialInfo:
    """One trial of a study, as the figures show it.

    Attributes:
        state: State of the trial, as in `TrialRecord`.
        params: (name, value) of each setting, with the names and order of the search space.
        values: Known objective values by name. For a running trial, time and bytes are extrapolated from its first
            steps, and the quality is from its last evaluation.
        best: Optimistic final quality of a running trial, which assumes that the trial will improve as much as the
            complete trial that improved most from the same fraction of training.
        curve: (step, loss, fraction of wrong answers) at each evaluation on the validation split.
        steps: Number of planned steps; `done` is the number of steps taken so far.
        is_front: Whether the trial is Pareto-optimal among complete trials, by more than the noise of measured times.
        is_by_noise: Whether the trial is Pareto-optimal only by a time difference within the measurement noise.
        is_baseline: Whether the trial is a baseline for comparison with the searched settings.
        note: Reason why the trial is missing from the plot, such as a strategy whose time on another link cannot be
            predicted.
    """

    number: int
    state: str
    params: tuple[tuple[str, Value], ...]
    values: Mapping[str, float]
    curve: Curve
    steps: int
    done: int
    reason: str = ""
    run: str | None = None
    best: float | None = None
    is_front: bool = False
    is_by_noise: bool = False
    is_pinned: bool = False
    is_counted: bool = True
    is_baseline: bool = False
    note: str = ""

    @property
    def settings(self) -> str:
        """The trial's settings in one line."""
        return " · ".join(f"{short_name(name)} {value_text(value)}" for name, value in self.params)


def short_name(name: str) -> str:
    """Return the short name of a setting, such as ``lr`` for ``optimizer[lamb].lr``."""
    return name.rsplit(".", 1)[-1].replace("_", " ")


def settings_of(trial: TrialInfo) -> dict[str, str]:
    """Return the trial's settings as text, by short name; values of settings with the same short name are joined."""
    found: dict[str, str] = {}
    for name, value in trial.params:
        short, text = short_name(name), value_text(value)
        found[short] = f"{found[short]}, {text}" if short in found else text
    return found


def value_text(value: object) -> str:
    """Format a setting's value, floats with three significant digits."""
    return three_digits(value) if isinstance(value, float) else str(value)


def objective_text(name: str, value: float) -> str:
    """Format an objective's value with its unit."""
    if name == ORDER:
        return f"{value:.0f}"
    if name == "seconds":
        return duration_text(value)
    if name in {"bytes", "memory"}:
        return bytes_text(value)
    return f"{value:.1%}" if name == "error" else f"{value:.4g}"


def title_of(name: str) -> str:
    """Return the axis title of an objective."""
    return TITLES.get(name, name)


def trials_info(
    records: Sequence[TrialRecord],
    objectives: Sequence[str],
    *,
    steps_of: Callable[[TrialRecord], int],
    live: Mapping[int, TrialMetrics] | None = None,
    is_baseline: Callable[[Mapping[str, Value]], bool] = lambda _: False,
) -> list[TrialInfo]:
    """Return the trials of a study, including running trials with their progress so far.

    Args:
        records: Records of all trials.
        objectives: Objectives of the study; its quality is the first of ``loss`` and ``error`` among them.
        steps_of: Function that returns the planned number of steps of a trial.
        live: Current measurements of the trials running in this process, by trial number.
        is_baseline: Function that returns whether settings belong only to a baseline.
    """
    quality = next((name for name in objectives if name in QUALITIES), QUALITIES[0])
    found = [
        replace(
            _trial(record, (live or {}).get(record.number), steps_of),
            is_baseline=record.origin == "baseline" or is_baseline(record.params),
        )
        for record in records
    ]
    done = [trial for trial in found if trial.state == "complete"]
    return with_front(
        [replace(t, best=optimistic(t, done, quality)) if t.state == "running" else t for t in found],
        objectives,
    )


def with_front(trials: Sequence[TrialInfo], objectives: Collection[str]) -> list[TrialInfo]:
    """Return the trials with `is_front` and `is_by_noise` computed for these objectives."""
    done = [t for t in trials if t.state == "complete" and all(name in t.values for name in objectives)]
    found = front_of({trial.number: {name: trial.values[name] for name in objectives} for trial in done})
    return [
        _placed(t, is_front=t.number in found.clear, is_by_noise=t.number in found.by_noise) for t in trials
    ]


def _placed(trial: TrialInfo, *, is_front: bool, is_by_noise: bool) -> TrialInfo:
    if (trial.is_front, trial.is_by_noise) == (is_front, is_by_noise):
        return trial
    return replace(trial, is_front=is_front, is_by_noise=is_by_noise)


def _trial(
    record: TrialRecord, live: TrialMetrics | None, steps_of: Callable[[TrialRecord], int]
) -> TrialInfo:
    measured = live if live is not None and record.state == "running" else record.measured
    steps = steps_of(record)
    values = _known(measured, steps) if measured is not None else {}
    return TrialInfo(
        record.number, record.state, tuple(record.params.items()), {**values, **(record.values or {})},
        measured.curve if measured else (), steps, measured.steps if measured else 0, record.reason or "",
        record.run, is_pinned=record.pinned, is_counted=record.counted,
    )  # fmt: skip


def _known(measured: TrialMetrics, steps: int) -> dict[str, float]:
    """Return the known objective values of a run; qualities are from its last evaluation."""
    known = {name: measured.objective(name, steps) for name in OBJECTIVES if name not in QUALITIES}
    if measured.curve:
        known |= dict(zip(QUALITIES, measured.curve[-1][1:], strict=True))
    return {name: value for name, value in known.items() if value is not None and value == value}  # noqa: PLR0124


def quality_curve(trial: TrialInfo, quality: str) -> list[tuple[float, float]]:
    """Return (fraction of training completed, quality) at each evaluation of the trial."""
    place = 1 + QUALITIES.index(quality)
    return [(row[0] / trial.steps, row[place]) for row in trial.curve if row[place] == row[place]]


def optimistic(trial: TrialInfo, done: Sequence[TrialInfo], quality: str) -> float | None:
    """Return an optimistic estimate of a running trial's final quality, using the pruning rule.

    The rule assumes that the trial will improve as much as the complete trial that improved most from the same fraction
    of training. The result is None before the trial's first evaluation, and while there is no complete trial.
    """
    if quality not in QUALITIES:
        return None
    own = quality_curve(trial, quality)
    if not own:
        return None
    share, now = own[-1]
    found = improvement([quality_curve(other, quality) for other in done], share)
    return found.best_end(now) if found.num_trials else None
