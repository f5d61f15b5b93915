"""The result of comparing a run with its prediction: a row for each term, as data, text and HTML."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, Literal

from shardscope.measure.compare import view

if TYPE_CHECKING:
    import pandas as pd

SCHEMA = 1
"""Version of the fields of `Comparison.to_dict`."""
Group = Literal["bytes", "messages", "memory", "time"]
COLUMNS = ("predicted", "simulated", "measured")


@dataclass(frozen=True)
class ComparedTerm:
    """One term of a run: its figure by each way that there is.

    Attributes:
        group: ``bytes`` or ``messages`` of a collective in a step, ``memory`` of a kind, ``time`` of a part of a step.
        term: Name of the term, the same in the run and in its prediction.
        unit: ``bytes``, ``messages`` or ``s``.
        ranks: Ranks that the figures are of: ``all ranks`` (their sum), ``fullest rank``, ``slowest rank`` or one rank.
        predicted: By the formulas, in `unit`.
        measured: By the run, in `unit`.
        simulated: By a simulation, in `unit`; None if there is none.
        bounds: Fewest and most that the formulas allow; None for a single figure.
        agrees: Whether each rank's measured figure is the predicted one, or within the bounds; None for an estimate.
        by_rank: Predicted and measured figures of each rank; empty for times.
        part_of: Term whose part this is, such as ``communication``; None for a term of the group itself.
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

    @property
    def error(self) -> float | None:
        """Predicted over measured, minus 1; None if nothing was measured, but something predicted."""
        if self.predicted == self.measured:
            return 0.0
        return self.predicted / self.measured - 1 if self.measured else None

    def to_dict(self) -> dict[str, Any]:
        """The fields that have a value, and the error, as plain values."""
        given = {field.name: getattr(self, field.name) for field in fields(self)} | {"error": self.error}
        return {name: value for name, value in given.items() if value not in (None, ())}


@dataclass(frozen=True)
class Comparison:
    """A run beside its prediction, made by `compare`. `frame` and `to_dict` return the rows as data.

    Attributes:
        run_id: Name of the run directory.
        label: Name of the run.
        where: What was predicted: ``this machine``, or the name of the cluster.
        rows: The terms that both sides have, by group.
        notes: Steps and ranks that the rows are of, and why terms are left out.
    """

    run_id: str
    label: str
    where: str
    rows: tuple[ComparedTerm, ...]
    notes: tuple[str, ...]

    def __getitem__(self, name: tuple[str, str]) -> ComparedTerm:
        """Return a row by its group and its term."""
        for row in self.rows:
            if (row.group, row.term) == name:
                return row
        raise KeyError(name)

    @property
    def columns(self) -> tuple[str, ...]:
        """The ways by which there are figures, of ``predicted``, ``simulated`` and ``measured``."""
        return tuple(name for name in COLUMNS if any(getattr(row, name) is not None for row in self.rows))

    @property
    def disagreeing(self) -> tuple[ComparedTerm, ...]:
        """The rows whose prediction claims to be exact, or to have bounds, and is not."""
        return tuple(row for row in self.rows if row.agrees is False)

    @property
    def verdict(self) -> str:
        """The result in a sentence or two."""
        return view.verdict(self)

    def frame(self) -> pd.DataFrame:
        """Return a row for each term; columns without any value, such as `simulated`, are left out.

        Columns: group, term, ranks, unit, the figures in `columns`, error (predicted over measured, minus 1), fewest
        and most (bounds), agrees.
        """
        import pandas as pd

        rows = [
            {
                **{name: getattr(row, name) for name in ("group", "term", "ranks", "unit", *self.columns, "error")},
                "fewest": row.bounds and row.bounds[0], "most": row.bounds and row.bounds[1], "agrees": row.agrees,
            }
            for row in self.rows
        ]  # fmt: skip
        return pd.DataFrame(rows).dropna(axis="columns", how="all")

    def to_dict(self) -> dict[str, Any]:
        """The comparison as plain values, for JSON; a figure that there is not has no key."""
        return {
            "schema": SCHEMA, "run": self.run_id, "label": self.label, "where": self.where,
            "columns": list(self.columns), "rows": [row.to_dict() for row in self.rows], "notes": list(self.notes),
        }  # fmt: skip

    def __repr__(self) -> str:
        return view.as_text(self)

    def _repr_html_(self) -> str:
        return view.as_html(self)
