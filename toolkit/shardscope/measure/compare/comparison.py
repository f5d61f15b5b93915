"""The result of comparing a run with its prediction: one row per term, available as data, text and HTML."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, Literal

from shardscope.measure.compare import view
from shardscope.measure.compare.residual import Expected, Residual, residual_of
from shardscope.show import Part, Shown

if TYPE_CHECKING:
    import pandas as pd

SCHEMA = 1
"""Version of the fields that `Comparison.to_dict` returns."""
Group = Literal["bytes", "messages", "memory", "time"]
COLUMNS = ("predicted", "now", "simulated", "measured")
_ERRORS = ("error", "simulated_error")


@dataclass(frozen=True)
class ComparedTerm:
    """One term of a comparison: its predicted, measured and, if available, simulated value.

    Attributes:
        group: ``bytes`` or ``messages`` (per step, of a collective), ``memory`` (of one type) or ``time`` (of a part of
            a step). `Comparison.per` says which kind of step.
        term: Name of the term, the same in the run and in its prediction. The row of the whole step is named after
            `Comparison.per`.
        unit: ``bytes``, ``messages`` or ``s``.
        ranks: Ranks to which the values apply: ``all ranks`` (their sum), ``fullest rank``, ``slowest rank``, ``all
            workers`` (asynchronous ones together) or one rank.
        predicted: Value from the formulas, in `unit`. A run's own prediction uses the calibration constants at its
            launch.
        now: Value with the current calibration constants, in `unit`; None unless they are newer than the constants
            used for `predicted`.
        measured: Value from the run, in `unit`.
        simulated: Value from a simulation, in `unit`; None if there is none.
        bounds: Lowest and highest value that the formulas allow; None if they give a single value.
        agrees: Whether the measured value equals the predicted one or lies within the bounds, on each rank or in the
            sum over ranks; None for an estimate.
        by_rank: Predicted and measured value of each rank; empty for times.
        interval: 90 % interval of the prediction, in `unit`; None except for the whole step.
        part_of: Name of the term that includes this one, such as ``communication``; None for a term at the top of its
            group.
    """

    group: Group
    term: str
    unit: str
    ranks: str
    predicted: float
    measured: float
    simulated: float | None = None
    bounds: tuple[float, float] | None = None
    agrees: bool | None = None
    by_rank: tuple[tuple[float, float], ...] = ()
    part_of: str | None = None
    interval: tuple[float, float] | None = None
    now: float | None = None

    @property
    def is_inside(self) -> bool | None:
        """Whether the measured value lies in the interval of the prediction; None without an interval."""
        return None if self.interval is None else self.interval[0] <= self.measured <= self.interval[1]

    @property
    def error(self) -> float | None:
        """Relative error of the prediction, predicted / measured - 1; None if only the measured value is zero."""
        if self.predicted == self.measured:
            return 0.0
        return self.predicted / self.measured - 1 if self.measured else None

    @property
    def simulated_error(self) -> float | None:
        """Relative error of the simulation, simulated / measured - 1; None without a simulated or a measured value."""
        if self.simulated is None:
            return None
        if self.simulated == self.measured:
            return 0.0
        return self.simulated / self.measured - 1 if self.measured else None

    def to_dict(self) -> dict[str, Any]:
        """Return the fields that have a value, and the errors, as plain values."""
        given = {field.name: getattr(self, field.name) for field in fields(self)}
        given |= {"error": self.error, "simulated_error": self.simulated_error}
        return {name: value for name, value in given.items() if value not in (None, ())}


@dataclass(frozen=True, repr=False)
class Comparison(Shown):
    """A run compared with its prediction, as returned by `compare`. `frame` and `to_dict` return the rows as data.

    Attributes:
        run_id: Name of the run directory.
        label: Name of the run.
        where: Machine of the prediction: ``this machine``, or the name of the cluster.
        rows: The terms that both the run and the prediction have, sorted by group.
        notes: Sentences that say which steps and ranks the values come from, why terms are left out, and what is to be
            known of the constants, such as that they are another machine's.
        per: Kind of step to which bytes, messages and times apply: ``step``, or ``compressed step`` if the run's first
            steps were sent uncompressed. Those are left out here, but not in a `Summary`.
    """

    run_id: str
    label: str
    where: str
    rows: tuple[ComparedTerm, ...]
    notes: tuple[str, ...]
    per: str = "step"
    conditions: str = ""
    """With which constants the run was predicted at its launch, and how busy the machine was; empty if unknown."""
    reason: str = ""
    """Why the step took longer than predicted, as far as the run recorded it; empty if unknown."""

    def __getitem__(self, name: tuple[str, str]) -> ComparedTerm:
        """Return the row with this group and term."""
        for row in self.rows:
            if (row.group, row.term) == name:
                return row
        raise KeyError(name)

    @property
    def columns(self) -> tuple[str, ...]:
        """Names of the columns that have values, out of ``predicted``, ``now``, ``simulated`` and ``measured``."""
        return tuple(name for name in COLUMNS if any(getattr(row, name) is not None for row in self.rows))

    @property
    def disagreeing(self) -> tuple[ComparedTerm, ...]:
        """The rows whose prediction should be exact or bounded, but does not match the measurement."""
        return tuple(row for row in self.rows if row.agrees is False)

    @property
    def verdict(self) -> str:
        """The result in one or two sentences."""
        return view.verdict(self)

    def residual(self, expected: Expected = "predicted") -> Residual | None:
        """Return what explains the difference in step time, term by term; None if the step's parts are unknown.

        Args:
            expected: The column to explain: ``predicted`` or ``simulated``.
        """
        return residual_of(self, expected)

    def frame(self) -> pd.DataFrame:
        """Return a data frame with one row for each term; columns without any value, such as `simulated`, are left out.

        Columns: group, term, ranks, unit, the columns in `columns`, error (predicted / measured - 1), simulated_error
        (simulated / measured - 1), fewest and most (the bounds), agrees, interval_low and interval_high (the 90 %
        interval of the step time).
        """
        import pandas as pd

        rows = [
            {
                **{name: getattr(row, name) for name in ("group", "term", "ranks", "unit", *self.columns, *_ERRORS)},
                "fewest": row.bounds and row.bounds[0], "most": row.bounds and row.bounds[1], "agrees": row.agrees,
                "interval_low": row.interval and row.interval[0], "interval_high": row.interval and row.interval[1],
            }
            for row in self.rows
        ]  # fmt: skip
        return pd.DataFrame(rows).dropna(axis="columns", how="all")

    def to_dict(self) -> dict[str, Any]:
        """Return the comparison as plain values, for JSON; missing values have no key."""
        return {
            "schema": SCHEMA, "run": self.run_id, "label": self.label, "where": self.where,
            "per": self.per, "conditions": self.conditions, "reason": self.reason, "columns": list(self.columns),
            "rows": [row.to_dict() for row in self.rows], "notes": list(self.notes),
        }  # fmt: skip

    def _shown(self) -> list[Part]:
        return view.shown(self)
