"""Accuracy of past predictions: step times predicted at the launch of runs, compared with the measured ones."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any, NamedTuple

from shardscope import show
from shardscope.errors import ShardscopeError, unknown_name
from shardscope.runtime import Run, runs
from shardscope.runtime.record.launch_prediction import LaunchPrediction
from shardscope.show import Part, Sentences, Shown, Table
from shardscope.spec.settings import settings_of

if TYPE_CHECKING:
    import pandas as pd

SCHEMA = 1
FEWEST_COUNTED = 10
"""Fewest step times of which the share inside their 90% intervals is stated: one of ten is expected outside."""


class PredictedRun(NamedTuple):
    """A run with its predicted and its measured step time.

    Attributes:
        run_id: Name of the run directory.
        name: Name of the run.
        started_at: Start time of its first rank, in seconds since 1970.
        settings: The settings of its job, such as ``strategy``, and ``cluster``, by name.
        predicted: Prediction made at the launch.
        measured_s: Median time of a step, in seconds.
    """

    run_id: str
    name: str
    started_at: float
    settings: dict[str, Any]
    predicted: LaunchPrediction
    measured_s: float

    @property
    def error(self) -> float:
        """Predicted divided by measured step time, minus 1: 0.1 if the prediction is 10 % too long."""
        return self.predicted.step_time_s / self.measured_s - 1

    @property
    def is_inside(self) -> bool | None:
        """Whether the measured time is in the predicted interval; None without an interval."""
        interval = self.predicted.interval
        return None if interval is None else interval.low <= self.measured_s <= interval.high


@dataclass(frozen=True, repr=False)
class Accuracy(Shown):
    """Predicted and measured step times of runs, oldest first, as returned by `accuracy`.

    Attributes:
        runs: The runs with a predicted and a measured step time.
        without: Number of other runs: not finished, too short, or launched without a predicted step time.
    """

    runs: tuple[PredictedRun, ...]
    without: int = 0

    @property
    def median_error(self) -> float | None:
        """Median of the absolute relative errors; None without runs."""
        return _median_error(self.runs)

    @property
    def coverage(self) -> float | None:
        """Fraction of the measured times within their 90 % prediction intervals; None if there are no intervals."""
        return _coverage(self.runs)

    def frame(self) -> pd.DataFrame:
        """Return one row per run; empty without runs.

        Columns: run, started, name, strategy, model, world_size, cluster, step times in seconds (predicted_s,
        measured_s), their error, whether the measured time is inside the predicted interval, load of the machine at the
        launch, and constants.
        """
        import pandas as pd

        rows = [
            {
                "run": run.run_id, "started": pd.Timestamp(run.started_at, unit="s"), "name": run.name,
                **{name: run.settings.get(name) for name in ("strategy", "model", "world_size", "cluster")},
                "predicted_s": run.predicted.step_time_s, "measured_s": run.measured_s, "error": run.error,
                "inside": run.is_inside, "load": run.predicted.load, "constants": run.predicted.constants,
            }
            for run in self.runs
        ]  # fmt: skip
        return pd.DataFrame(rows)

    def by(self, setting: str = "strategy") -> pd.DataFrame:
        """Return, for each value of a setting, the number of runs, the median and the largest error, and the coverage.

        Args:
            setting: Name of a setting of the jobs, such as ``strategy``, ``model`` or ``world_size``; or ``cluster``,
                or ``constants``.

        Raises:
            SpecError: No run has such a setting.
        """
        import pandas as pd

        groups = [
            {
                setting: value,
                "runs": len(group),
                "median_error": _median_error(group),
                "largest_error": max((run.error for run in group), key=abs),
                "coverage": _coverage(group),
            }
            for value, group in self._groups(setting)
        ]
        return pd.DataFrame(groups).set_index(setting) if groups else pd.DataFrame()

    def _groups(self, setting: str) -> list[tuple[Any, list[PredictedRun]]]:
        known = dict.fromkeys(name for run in self.runs for name in run.settings)
        if self.runs and setting not in known:
            raise unknown_name("setting", setting, known)
        found: dict[Any, list[PredictedRun]] = {}
        for run in self.runs:
            found.setdefault(run.settings.get(setting), []).append(run)
        return list(found.items())

    def to_dict(self) -> dict[str, Any]:
        """Return plain values, for JSON."""
        rows = [
            {
                "run": run.run_id, "started_at": run.started_at, "settings": run.settings,
                "predicted_s": run.predicted.step_time_s, "interval_s": run.predicted.interval,
                "constants": run.predicted.constants, "is_calibrated": run.predicted.is_calibrated,
                "load": run.predicted.load,
                "measured_s": run.measured_s, "error": run.error,
            }
            for run in self.runs
        ]  # fmt: skip
        return {
            "schema": SCHEMA, "median_error": self.median_error, "coverage": self.coverage, "without": self.without,
            "runs": rows,
        }  # fmt: skip

    @property
    def headline(self) -> str:
        """The step times inside their intervals, the median error, and the runs left out, in sentences."""
        counted = "1 other run has" if self.without == 1 else f"{self.without} other runs have"
        others = f" {counted} no predicted or no measured step time." if self.without else ""
        if not self.runs:
            return "No run has both a predicted and a measured step time." + others
        counted = "1 run" if len(self.runs) == 1 else f"{len(self.runs)} runs"
        error = f"median error of {counted}, predicted at launch: {self.median_error:.1%}"
        inside = inside_text(self.runs)
        return f"{inside}; {error}.{others}" if inside else f"{error[0].upper()}{error[1:]}.{others}"

    def text(self, setting: str = "strategy") -> str:
        """Return the headline and a table by a setting; see `by`."""
        return show.text(self._shown(setting))

    def _shown(self, setting: str = "strategy") -> list[Part]:
        table = self.by(setting)
        table = table if table.empty else table.reset_index()
        return [Sentences([self.headline]), Table.of_frame(table, texts=_TEXTS)]


def inside_text(runs: Iterable[PredictedRun]) -> str:
    """Return how many measured step times lie inside their intervals, in words; empty without intervals.

    For fewer than `FEWEST_COUNTED`, of which a share would say nothing, return how far they are from the predictions.
    """
    known = [run for run in runs if run.is_inside is not None]
    if not known:
        return ""
    if len(known) < FEWEST_COUNTED:
        errors = sorted(abs(run.error) for run in known)
        low, high = (f"{100 * error:.0f}" for error in (errors[0], errors[-1]))
        times = "1 step-time prediction" if len(known) == 1 else f"{len(known)} step-time predictions"
        errors_text = f"an error of {high}" if low == high else f"errors of {low} to {high}"
        return f"{times} checked so far on this machine, with {errors_text}%"
    inside = sum(run.is_inside is True for run in known)
    return f"{inside} of {len(known)} step times on this machine inside their 90% prediction interval"


_TEXTS = {"median_error": "{:.1%}".format, "largest_error": "{:+.0%}".format, "coverage": "{:.0%}".format}


def accuracy(
    root: str | Path | None = None,
    *,
    group: str | None = None,
    all: bool = False,  # noqa: A002 - as in `runs`
) -> Accuracy:
    """Compare the step times that were predicted when runs were launched with the measured step times.

    Every launch on CPU ranks records the prediction and the constants used for it, so the errors show how predictions
    have improved with each calibration. Jobs on GPUs, jobs with a model of your own, and jobs launched with
    ``preflight=False`` have no predicted step time.

    Args:
        root: Folder of the runs; None uses ``$SHARDSCOPE_RUNS`` or ``./runs``.
        group: Group whose runs to include; None for all runs.
        all: Whether to include the runs that tools launched for measurements of their own.

    Example:
        >>> accuracy().by("strategy")  # doctest: +SKIP
    """
    return accuracy_of(runs(root, all=all, group=group))


def accuracy_of(runs: Sequence[Run]) -> Accuracy:
    """Return the accuracy of the predictions of these runs."""
    compared = [row for row in map(_row, runs) if row is not None]
    return Accuracy(
        tuple(sorted(compared, key=lambda row: (row.started_at, row.run_id))), len(runs) - len(compared)
    )


def _row(run: Run) -> PredictedRun | None:
    """Return a run's predicted and measured time; None if one of them is missing."""
    predicted = run.predicted
    if predicted is None or run.is_alive:
        return None
    try:
        summary = run.summary()
        measured = (
            None if summary.world_sizes else summary.step_time_s
        )  # predicted for the first number of ranks
        started = min((event["t"] for event in run.events("start")), default=None)
        cluster = "this machine" if run.cluster is None else run.cluster.name
        settings = {**settings_of(run.job), "cluster": cluster, "constants": predicted.constants}
    except ShardscopeError:  # damaged, or no step was finished
        return None
    if not measured or started is None:
        return None
    return PredictedRun(run.id, run.name, started, settings, predicted, measured)


def _median_error(rows: Iterable[PredictedRun]) -> float | None:
    errors = [abs(row.error) for row in rows]
    return median(errors) if errors else None


def _coverage(rows: Sequence[PredictedRun]) -> float | None:
    inside = [row.is_inside for row in rows if row.is_inside is not None]
    return sum(inside) / len(inside) if inside else None
