"""The result of comparing a run with its prediction: one row per term, available as data, text and HTML."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from itertools import groupby
from typing import TYPE_CHECKING, Any, Literal

from shardscope.measure.compare.measured import REST
from shardscope.measure.compare.residual import Expected, Residual, by_axis, residual_of
from shardscope.runlog.axes import axis_of
from shardscope.show import Cell, Part, Row, Sentences, Shown, Table
from shardscope.spec.units import figure, listed

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
            a step). See `Comparison.per` for the kind of step.
        term: Name of the term, the same in the run and in its prediction. The row of the whole step is named after
            `Comparison.per`.
        unit: ``bytes``, ``messages`` or ``s``.
        ranks: Ranks to which the values apply: ``all ranks`` (their sum), ``peak per rank``, ``slowest rank``, ``all
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
        """Relative error of the prediction, predicted / measured - 1; None for a rest, or if the measured
        value is 0.
        """
        if (self.group, self.term) == ("time", REST):
            return None
        if self.predicted == self.measured:
            return 0.0
        return self.predicted / self.measured - 1 if self.measured else None

    @property
    def simulated_error(self) -> float | None:
        """Relative error of the simulation, simulated / measured - 1; None without a simulated or a measured value."""
        if self.simulated is None or (self.group, self.term) == ("time", REST):
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
        notes: Sentences on the steps and ranks of the values, on terms that are left out, and on the
            constants, for example if they are from another machine.
        per: Kind of step to which bytes, messages and times apply: ``step``, or ``compressed step`` if the run's first
            steps were sent uncompressed. Uncompressed steps are left out here, but not in a `Summary`.
    """

    run_id: str
    label: str
    where: str
    rows: tuple[ComparedTerm, ...]
    notes: tuple[str, ...]
    per: str = "step"
    conditions: str = ""
    """Constants of the prediction at the run's launch, and load of the machine; empty if unknown."""
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
        return verdict(self)

    def residual(self, expected: Expected = "predicted") -> Residual | None:
        """Return the difference in step time, broken down by term; None if the step's parts are unknown.

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
        return shown(self)


_HEADINGS = {
    "bytes": "Bytes sent per {per}", "messages": "Messages per {per}", "memory": "Memory", "time": "Time of a {per}",
}  # fmt: skip
"""Headings of the groups of rows; ``per`` is the kind of step."""
_MANY = 10.0
"""Ratio of predicted to measured value at and above which the error is written as a multiple."""
_ALL = -0.995
"""Relative error below which the error is written as a multiple, because a percentage would round to -100%."""
_SHARE = 0.2
"""Minimum fraction of the deviation in step time for a term to be named as a cause."""
_FEW_PERCENT = 0.095
"""Relative error below which the percentage is written with one decimal place."""
_ALMOST_NONE = 0.001
_EXACT = "exact"
_ALL_THE_SAME = (
    "The simulated step equals the predicted one in every term, so the table has no column for it."
)
_SAME = "Simulated values are shown only where they differ from predicted ones."
_AS_PREDICTED = 0.1
"""Largest error of the step time for which no cause is named."""


def heading_of(group: str, per: str) -> str:
    """Return the heading of a group of rows, such as ``Bytes sent per compressed step``."""
    return _HEADINGS[group].format(per=per)


def value_text(value: float | None, unit: str) -> str:
    """Format a value with its unit, such as ``93.98 KiB`` or ``1.216 ms``; messages as a plain number."""
    if value is None:
        return "-"
    return f"{value:,.6g}" if unit == "messages" else figure(value, unit)


def error_text(row: ComparedTerm) -> str:
    """Format the error of a prediction, such as ``exact``, ``within bounds``, ``+6.2%`` or ``12 ×``.

    If 0 was measured, there is no relative error, so the text is the difference, such as ``+100 B``. For a part of the
    step it is ``not measured``, because the run recorded no spans of this part.
    """
    if (row.group, row.term) == ("time", REST):
        return "-"
    if row.agrees:
        return _EXACT if row.bounds is None else "within bounds"
    if (
        row.unit == "bytes"
        and row.by_rank
        and all(predicted == measured for predicted, measured in row.by_rank)
    ):
        return _EXACT
    return _relative_text(row.predicted, row)


def simulated_error_text(row: ComparedTerm) -> str:
    """Format the error of a simulation as `error_text` does; a dash if the row has no simulated value."""
    if row.simulated is None or (row.group, row.term) == ("time", REST):
        return "-"
    if row.simulated == row.measured and row.agrees is not None:
        return _EXACT
    return _relative_text(row.simulated, row)


def _relative_text(value: float, row: ComparedTerm) -> str:
    """Format the error of a value, relative to the row's measured value."""
    if not row.measured and value:
        return "not measured" if row.group == "time" else f"+{value_text(value, row.unit)}"
    error = value / row.measured - 1 if row.measured else 0.0
    if error + 1 >= _MANY:
        return f"{error + 1:,.0f} ×"
    if -1 < error < _ALL:
        return f"{error + 1:.1g} ×"
    if abs(error) < _ALMOST_NONE:
        return "< 0.1%" if error else "0%"
    return f"{error:+.{1 if abs(error) < _FEW_PERCENT else 0}%}"


def verdict(comparison: Comparison) -> str:
    """Return sentences on whether exact terms agree, and on the parts that make the step time deviate."""
    return " ".join(filter(None, (_on_exact(comparison), _on_time(comparison))))


def _on_exact(comparison: Comparison) -> str:
    judged = [row for row in comparison.rows if row.agrees is not None]
    wrong = comparison.disagreeing
    if not judged:
        return ""
    if not wrong:
        groups = listed([_JUDGED[name] for name in dict.fromkeys(row.group for row in judged)])
        return f"{groups[0].upper()}{groups[1:]} agree with the prediction."
    named = ", ".join(f"{row.group} of {row.term}" for row in wrong)
    return f"{len(wrong)} of {len(judged)} terms differ from their exact or bounded prediction: {named}."


def _on_time(comparison: Comparison) -> str:
    times = {row.term: row for row in comparison.rows if row.group == "time"}
    step = times.pop(comparison.per, None)
    if step is None or step.error is None:
        return ""
    more_s = step.measured - step.predicted
    took = f"A {comparison.per} took {figure(step.measured, 's')} ({figure(step.predicted, 's')} predicted)"
    if step.is_inside is False:
        took += (
            f", outside the 90% prediction interval{f': {comparison.reason}' if comparison.reason else ''}"
        )
    if abs(step.error) <= _AS_PREDICTED:
        return f"{took}."
    shares = {
        row.term: (row.measured - row.predicted) / more_s
        for row in by_axis(list(times.values()))
        if row.term != REST
    }
    large = sorted(
        (name for name, share in shares.items() if share >= _SHARE), key=lambda name: -shares[name]
    )
    if not large:
        return f"{took}."
    named = " and ".join(f"{name} {_signed(times[name])}" for name in large[:2])
    return f"{took}. The largest difference{'s' * (len(large) > 1)}: {named}."


def _signed(row: ComparedTerm) -> str:
    more_s = row.measured - row.predicted
    return f"{'+' if more_s >= 0 else '-'}{figure(abs(more_s), 's')}"


def state_of(comparison: Comparison) -> str:
    """Return the state that determines the verdict's colour, by its worst finding: ``failed``, ``warning`` or
    ``completed``.
    """
    if comparison.disagreeing:
        return "failed"
    return "warning" if any(row.is_inside is False for row in comparison.rows) else "completed"


_JUDGED = {"bytes": "bytes", "messages": "messages", "memory": "model states"}
"""Terms with an exact or bounded prediction, in words, by group."""
OVERVIEW = (
    "run", "bytes", "messages", "states", "activations", "predicted step", "90% interval", "measured step", "error",
)  # fmt: skip
"""Columns of `overview`."""
_OUTSIDE = " *"
"""Mark of a measured time outside the interval of its prediction."""
_STATES = ("parameters", "gradients", "optimizer", "buffers")


def overview(comparisons: Iterable[Comparison]) -> list[list[str]]:
    """Return one row of text for each comparison, with the columns of `OVERVIEW`.

    After the run's name, the columns are the errors of four groups of terms, the predicted step time and its interval,
    the measured step time, and the error, marked where the measured time is outside the interval.
    """
    return [_overview_row(comparison) for comparison in comparisons]


def interval_text(comparison: Comparison) -> list[str]:
    """Return lines with the interval of the step time, whether the measured time is inside, and the conditions."""
    conditions = [comparison.conditions] if comparison.conditions else []
    step = next((row for row in comparison.rows if row.interval is not None), None)
    if step is None or step.interval is None:
        return conditions
    side = "inside" if step.is_inside else "outside"
    text = (
        f"The measured time of a {step.term} is {side} the 90% prediction interval, {_interval_cell(step)}."
    )
    return [text, *conditions]


def _overview_row(comparison: Comparison) -> list[str]:
    rows = {(row.group, row.term): row for row in comparison.rows}
    sent = [[row for row in comparison.rows if row.group == group] for group in ("bytes", "messages")]
    states = [rows["memory", kind] for kind in _STATES if ("memory", kind) in rows]
    activations, step = rows.get(("memory", "activations")), rows.get(("time", comparison.per))
    return [
        comparison.label, *map(_worst, sent), _worst(states), _worst([activations] if activations else []),
        *(_step_cells(step, comparison.per) if step else "----"),
    ]  # fmt: skip


def _step_cells(step: ComparedTerm, per: str) -> tuple[str, str, str, str]:
    """Return the predicted time of a step, its interval, the measured time and the error.

    Times of a compressed step are labelled as such.
    """
    named = "" if per == "step" else f" a {per}"
    return (
        f"{value_text(step.predicted, 's')}{named}",
        _interval_cell(step),
        f"{value_text(step.measured, 's')}{named}",
        f"{error_text(step)}{_OUTSIDE * (step.is_inside is False)}",
    )


def _interval_cell(step: ComparedTerm) -> str:
    return "-" if step.interval is None else " to ".join(value_text(each, "s") for each in step.interval)


def _worst(rows: Sequence[ComparedTerm]) -> str:
    """Return the error of the row with the largest error; a dash if there are no rows."""
    if not rows:
        return "-"
    return error_text(max(rows, key=lambda row: (not row.agrees, row.error is None or abs(row.error))))


def shown_columns(rows: Sequence[ComparedTerm], columns: Sequence[str] = COLUMNS) -> list[str]:
    """Return the columns that have a value of their own: the simulated column is left out if it repeats the
    predicted one.

    Args:
        rows: The terms that are shown.
        columns: The columns to choose from.
    """
    kept = [name for name in columns if any(getattr(row, name) is not None for row in rows)]
    return [name for name in kept if name != "simulated" or not all(map(repeats, rows))]


def repeats(row: ComparedTerm) -> bool:
    """Return whether a row has no simulated value, or one that is the predicted value to every digit shown."""
    told = (value_text(value, row.unit) for value in (row.predicted, row.simulated))
    return row.simulated is None or len(set(told)) == 1


def _headers(columns: Sequence[str]) -> list[str]:
    """Return the names of the columns of a table: the values, and the error of each value except the measured one."""
    names = ["predicted now" if name == "now" else name for name in columns]
    return [*names, "error", "simulated error"] if "simulated" in names else [*names, "error"]


def _cells(row: ComparedTerm, columns: Sequence[str]) -> list[str | Cell]:
    is_told = {"simulated": not repeats(row)}
    values = [value_text(getattr(row, name), row.unit) if is_told.get(name, True) else "" for name in columns]
    error = Cell(error_text(row), about=_bounds_text(row), style=_LOOKS[row.agrees])
    more = [simulated_error_text(row) if is_told["simulated"] else ""] * ("simulated" in columns)
    return [Cell(row.term, indent=_depth(row)), *values, error, *more]


def _depth(row: ComparedTerm) -> int:
    """Return the indentation of a row; the time of a collective is nested below its axis, if it has one."""
    return 1 + bool(row.part_of) + (row.group == "time" and axis_of(row.term) is not None)


_LOOKS = {True: "opacity:.7", False: "font-weight:600", None: ""}
"""Style of the error of a term, by whether it agrees."""


def _groups(comparison: Comparison) -> list[tuple[str, list[ComparedTerm]]]:
    """Return each heading with its rows; a heading names a group of terms and the ranks that the rows apply to."""
    keyed = groupby(comparison.rows, key=lambda row: (row.group, row.ranks if row.group != "time" else ""))
    return [
        (f"{heading_of(first.group, comparison.per)}, {first.ranks}{_why(first, comparison)}", [first, *rest])
        for first, *rest in (list(rows) for _, rows in keyed)
    ]


def _why(row: ComparedTerm, comparison: Comparison) -> str:
    """Return a clause on why this rank's times are shown; empty for other rows, or with a single rank."""
    is_one = row.group == "time" and row.ranks.startswith("rank ")
    return ", which computes longest" * (is_one and any(len(each.by_rank) > 1 for each in comparison.rows))


def _title(comparison: Comparison) -> str:
    return f"{comparison.label} compared with its prediction for {comparison.where}"


def shown(comparison: Comparison) -> list[Part]:
    """Return the parts of a comparison to display; in HTML, the notes are folded."""
    head = [_title(comparison), verdict(comparison), *interval_text(comparison)]
    return [Sentences(head), table_of(comparison), notes_of(comparison)]


def notes_of(comparison: Comparison) -> Sentences:
    """Return the notes, folded, with a sentence on the values that the table leaves out."""
    told = shown_columns(comparison.rows)
    left_out = (
        "" if "simulated" not in comparison.columns else _SAME if "simulated" in told else _ALL_THE_SAME
    )
    return Sentences([*filter(None, [left_out]), *comparison.notes], is_titled=False, folded="Notes")


def table_of(comparison: Comparison) -> Table:
    """Return the rows as a table."""
    rows: list[Row] = []
    columns = shown_columns(comparison.rows)
    for heading, terms in _groups(comparison):
        rows += [heading, *(_cells(row, columns) for row in terms)]
    return Table(["", *_headers(columns)], rows)


def _bounds_text(row: ComparedTerm) -> str:
    return " to ".join(value_text(bound, row.unit) for bound in row.bounds or ())
