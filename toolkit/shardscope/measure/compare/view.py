"""What a comparison of a run with its prediction shows: sentences and a table."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import groupby
from typing import TYPE_CHECKING

from shardscope.measure.compare.measured import REST
from shardscope.show import Cell, Part, Row, Sentences, Table
from shardscope.spec.units import figure, listed

if TYPE_CHECKING:
    from shardscope.measure.compare.comparison import ComparedTerm, Comparison

_HEADINGS = {
    "bytes": "Bytes sent per {per}", "messages": "Messages per {per}", "memory": "Memory", "time": "Time of a {per}",
}  # fmt: skip
"""Headings of the groups of rows; ``per`` is the kind of step."""
_MANY = 10.0
"""Ratio of predicted to measured value at and above which the error is written as a multiple."""
_ALL = -0.995
"""Relative error below which a percentage would be -100%, so that the error is a multiple, too."""
_SHARE = 0.2
"""Smallest fraction of the deviation in step time for which a term is named as a cause."""
_FEW_PERCENT = 0.095
"""Relative error below which the percentage is written with one decimal place."""
_ALMOST_NONE = 0.001
_EXACT = "exact"
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

    Where 0 was measured, there is no relative error: the text is the difference, such as ``+100 B``. A part of the step
    with a measured time of 0 has no spans.
    """
    if (row.group, row.term) == ("time", REST):
        return "-"
    if row.agrees:
        return _EXACT if row.bounds is None else "within bounds"
    return _relative_text(row.predicted, row)


def simulated_error_text(row: ComparedTerm) -> str:
    """Format the error of a simulation as `error_text` does; a dash if the row has no simulated value."""
    if row.simulated is None or (row.group, row.term) == ("time", REST):
        return "-"
    if row.simulated == row.measured and row.agrees is not None:
        return _EXACT
    return _relative_text(row.simulated, row)


def _relative_text(value: float, row: ComparedTerm) -> str:
    """Format the error of a value, relative to the row's measured one."""
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
    """Return sentences that say whether exact terms agree, and which parts make the step time deviate."""
    return " ".join(filter(None, (_on_exact(comparison), _on_time(comparison))))


def _on_exact(comparison: Comparison) -> str:
    judged = [row for row in comparison.rows if row.agrees is not None]
    wrong = comparison.disagreeing
    if not judged:
        return ""
    if not wrong:
        groups = listed([_JUDGED[name] for name in dict.fromkeys(row.group for row in judged)])
        return f"{groups[0].upper()}{groups[1:]} agree."
    named = ", ".join(f"{row.group} of {row.term}" for row in wrong)
    return f"{len(wrong)} of {len(judged)} terms with an exact or bounded prediction differ: {named}."


def _on_time(comparison: Comparison) -> str:
    times = {row.term: row for row in comparison.rows if row.group == "time"}
    step = times.pop(comparison.per, None)
    if step is None or step.error is None:
        return ""
    more_s = step.measured - step.predicted
    took = f"A {comparison.per} took {figure(step.measured, 's')} (predicted: {figure(step.predicted, 's')})"
    if step.is_inside is False:
        took += f", outside its 90% interval{f': {comparison.reason}' if comparison.reason else ''}"
    if abs(step.error) <= _AS_PREDICTED:
        return f"{took}."
    shares = {
        name: (row.measured - row.predicted) / more_s
        for name, row in times.items()
        if row.part_of is None and name != REST
    }
    large = sorted(
        (name for name, share in shares.items() if share >= _SHARE), key=lambda name: -shares[name]
    )
    if not large:
        return f"{took}."
    named = " and ".join(f"{name} {_signed(times[name])}" for name in large[:2])
    return f"{took}; most of the difference: {named}."


def _signed(row: ComparedTerm) -> str:
    more_s = row.measured - row.predicted
    return f"{'+' if more_s >= 0 else '-'}{figure(abs(more_s), 's')}"


def state_of(comparison: Comparison) -> str:
    """Return the state whose colour is the worst of what the verdict says: ``failed``, ``warning`` or ``completed``."""
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
    the measured one, and the error, marked where the measured time is outside the interval.
    """
    return [_overview_row(comparison) for comparison in comparisons]


def interval_text(comparison: Comparison) -> list[str]:
    """Return lines with the interval of the step time, whether the measured one is inside, and the conditions."""
    conditions = [comparison.conditions] if comparison.conditions else []
    step = next((row for row in comparison.rows if row.interval is not None), None)
    if step is None or step.interval is None:
        return conditions
    side = "inside" if step.is_inside else "outside"
    text = f"90% interval of the predicted {step.term}: {_interval_cell(step)}; the measured one is {side}."
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

    Times are named if they are those of a compressed step.
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


def _headers(comparison: Comparison) -> tuple[str, ...]:
    """Return the names of the columns of a table: the values, and the error of each but the measured ones."""
    names = tuple("predicted now" if name == "now" else name for name in comparison.columns)
    return (*names, "error", "simulated error") if "simulated" in names else (*names, "error")


def _cells(row: ComparedTerm, columns: tuple[str, ...]) -> list[str | Cell]:
    values = [value_text(getattr(row, name), row.unit) for name in columns]
    error = Cell(error_text(row), about=_bounds_text(row), style=_LOOKS[row.agrees])
    more = [simulated_error_text(row)] * ("simulated" in columns)
    return [Cell(row.term, indent=2 if row.part_of else 1), *values, error, *more]


_LOOKS = {True: "opacity:.7", False: "font-weight:600", None: ""}
"""Style of the error of a term, by whether it agrees."""


def _groups(comparison: Comparison) -> list[tuple[str, list[ComparedTerm]]]:
    """Return each heading with its rows; a heading names a group of terms and the ranks that the rows apply to."""
    keyed = groupby(comparison.rows, key=lambda row: (row.group, row.ranks if row.group != "time" else ""))
    return [
        (f"{heading_of(first.group, comparison.per)}, {first.ranks}", [first, *rest])
        for first, *rest in (list(rows) for _, rows in keyed)
    ]


def _title(comparison: Comparison) -> str:
    return f"{comparison.label} compared with its prediction for {comparison.where}"


def shown(comparison: Comparison) -> list[Part]:
    """Return what a comparison shows; in HTML, the notes are folded."""
    head = [_title(comparison), verdict(comparison), *interval_text(comparison)]
    return [Sentences(head), table_of(comparison), notes_of(comparison)]


def notes_of(comparison: Comparison) -> Sentences:
    """Return the notes, folded."""
    return Sentences(comparison.notes, is_titled=False, folded="Notes")


def table_of(comparison: Comparison) -> Table:
    """Return the rows as a table."""
    rows: list[Row] = []
    for heading, terms in _groups(comparison):
        rows += [heading, *(_cells(row, comparison.columns) for row in terms)]
    return Table(["", *_headers(comparison)], rows)


def _bounds_text(row: ComparedTerm) -> str:
    return " to ".join(value_text(bound, row.unit) for bound in row.bounds or ())
