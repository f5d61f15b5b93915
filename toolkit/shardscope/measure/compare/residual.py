"""Breakdown of the difference between an expected and a measured step time into the terms of the step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal, NamedTuple

from shardscope.errors import SpecError
from shardscope.measure.compare.measured import ALL_WORKERS, COMMUNICATION, REST
from shardscope.runlog.axes import collective_text
from shardscope.spec.units import figure

if TYPE_CHECKING:
    from shardscope.measure.compare.comparison import ComparedTerm, Comparison

Expected = Literal["predicted", "simulated"]
_NAMED = 0.8
"""Fraction of the sum of all differences that the terms named in the sentence must explain."""
_ALIKE = 0.02
"""Difference, relative to the measured step, below which the two step times are called equal."""


class ResidualTerm(NamedTuple):
    """A term of the step: its expected and its measured seconds."""

    term: str
    expected_s: float
    measured_s: float

    @property
    def difference_s(self) -> float:
        """Seconds by which the measurement exceeds the expectation."""
        return self.measured_s - self.expected_s


class Residual(NamedTuple):
    """The difference between a step's expected and measured time, divided into terms that add up to it.

    Attributes:
        expected: ``predicted`` or ``simulated``.
        per: Kind of step, such as ``step``.
        expected_s: Expected time of a step, in seconds.
        measured_s: Measured time of a step, in seconds.
        terms: The terms, the largest difference first; `REST` is last.
    """

    expected: Expected
    per: str
    expected_s: float
    measured_s: float
    terms: tuple[ResidualTerm, ...]

    @property
    def difference_s(self) -> float:
        """Seconds by which the measured step exceeds the expected one."""
        return self.measured_s - self.expected_s

    @property
    def sentence(self) -> str:
        """The difference and the terms that explain most of it, in one sentence."""
        more_s = self.difference_s
        took = f"The {self.per} took {figure(self.measured_s, 's')}"
        large = [term for term in _largest(self.terms) if term.difference_s]
        named = ", ".join(f"{collective_text(term.term)} {_signed(term.difference_s)}" for term in large)
        expected = f"{self.expected} ({figure(self.expected_s, 's')})"
        if abs(more_s) < _ALIKE * self.measured_s:
            return f"{took}, as {expected} within {_ALIKE:.0%}. The largest differences cancel out: {named}."
        word = "longer" if more_s > 0 else "shorter"
        return f"{took}, {figure(abs(more_s), 's')} {word} than {expected}. The largest differences: {named}."


def residual_of(comparison: Comparison, expected: Expected = "predicted") -> Residual | None:
    """Return the breakdown of the difference in step time; None if the step or its parts lack the expected value.

    The result is also None for asynchronous workers, whose step is not a sum of parts.

    Communication is divided into its collectives if they were timed one by one; on a mesh, into its axes.

    Raises:
        SpecError: `expected` is neither ``predicted`` nor ``simulated``.
    """
    if expected not in ("predicted", "simulated"):
        raise SpecError(f"expected={expected!r} is not a column to explain; use 'predicted' or 'simulated'")
    rows = {row.term: row for row in comparison.rows if row.group == "time"}
    step = rows.pop(comparison.per, None)
    rows.pop(REST, None)  # of the parts in the table, of which collectives are not some
    if step is not None and step.ranks == ALL_WORKERS:  # its parts are those of one worker's gradient
        return None
    start = None if step is None else getattr(step, expected)
    if step is None or start is None or not rows:
        return None
    leaves = _leaves(list(rows.values()))
    if any(getattr(row, expected) is None for row in leaves):
        return None
    terms = [ResidualTerm(row.term, float(getattr(row, expected)), row.measured) for row in leaves]
    terms.sort(key=lambda term: -abs(term.difference_s))
    expected_s = start - sum(term.expected_s for term in terms)
    measured_s = step.measured - sum(term.measured_s for term in terms)
    rest = ResidualTerm(REST, round(expected_s, 12), round(measured_s, 12))
    return Residual(expected, comparison.per, start, step.measured, (*terms, rest))


def by_axis(rows: Sequence[ComparedTerm]) -> list[ComparedTerm]:
    """Return the top-level rows of each group; on a mesh, the rows of its axes replace their sum."""
    sums = {row.part_of for row in rows if row.part_of}
    axes = {row.term: row.part_of for row in rows if row.part_of and row.term in sums}
    divided = set(axes.values())
    return [row for row in rows if (row.part_of is None and row.term not in divided) or row.term in axes]


def _leaves(rows: Sequence[ComparedTerm]) -> list[ComparedTerm]:
    axes = by_axis(rows)
    if any(row.part_of for row in axes):
        return axes
    has_parts = any(row.part_of == COMMUNICATION for row in rows)
    return [row for row in rows if not (has_parts and row.term == COMMUNICATION)]


def _largest(terms: Sequence[ResidualTerm]) -> list[ResidualTerm]:
    """Return the smallest number of terms, at most three, that make up most of the sum of absolute differences."""
    ranked = sorted(terms, key=lambda term: -abs(term.difference_s))
    whole, sum_s, found = sum(abs(term.difference_s) for term in ranked), 0.0, []
    for term in ranked[:3]:
        found.append(term)
        sum_s += abs(term.difference_s)
        if sum_s >= _NAMED * whole:
            break
    return found


def _signed(seconds: float) -> str:
    return f"{'+' if seconds >= 0 else '-'}{figure(abs(seconds), 's')}"
