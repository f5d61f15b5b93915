"""Scores of the published tables, as the wheel has them.

    cd tests; python -m published.shipped

writes ``toolkit/shardscope/calibration/catalogue/scores.json`` anew. Do so after every change that moves predictions.
"""

from __future__ import annotations

import csv
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from published.lines import board
from published.memory.board import (
    fit_lines,
    memory_tables,
    peak_lines,
    runs_that_ran,
    total_fits,
    without_largest,
)
from published.tables import published
from shardscope.commands._output import as_json

HERE = Path(__file__).parent
SCORES = HERE.parents[1] / "toolkit" / "shardscope" / "calibration" / "catalogue" / "scores.json"


def scores() -> dict[str, Any]:
    """Return the scores of all tables."""
    return {"tables": step_times(), "memory": memory()}


def step_times(names: set[str] | None = None) -> list[dict[str, object]]:
    """Return the scores of tables of step times with their sources; of all tables if `names` is None."""
    tables = {name: rows for name, rows in published().items() if names is None or name in names}
    devices = {name: sorted({row.cluster.device.name for row in rows}) for name, rows in tables.items()}
    return [
        line.to_dict() | {"devices": devices[line.dataset], "source": sources()[line.dataset]}
        for line in board(tables, fitted=True)
    ]


def memory() -> dict[str, Any]:
    """Return the scores of tables of memory."""
    tables = memory_tables()
    fits = fit_lines(tables | runs_that_ran())
    return {
        "peaks": [line._asdict() for line in peak_lines(tables)],
        "fits": [line._asdict() for line in fits],
        "total": total_fits(fits)._asdict(),
        "without_largest": without_largest(fits)._asdict(),
    }


def sources() -> Mapping[str, str]:
    """Return where each table of step times comes from."""
    with (HERE / "sources.csv").open(encoding="utf-8", newline="") as lines:
        return {row["table"]: row["source"] for row in csv.DictReader(lines)}


if __name__ == "__main__":
    SCORES.write_text(as_json(scores()) + "\n", "utf-8")
