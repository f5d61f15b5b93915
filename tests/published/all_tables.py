"""All tables of measured steps, one for each software and type of device."""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path

import numpy as np
import numpy.typing as npt

from published import more, small
from published.datasets import load
from published.tables import published
from shardscope.calibration.effects import effects_of, usual
from shardscope.calibration.software import SOFTWARE
from shardscope.calibration.spread import moved, slopes
from shardscope.measure.calibrate.rows import Row, RowGroups

Floats = npt.NDArray[np.float64]
MOST_ROWS = 20
SCORED_ONLY = ("FSDP of Lightning, V100",)
"""Tables that are not fitted, because what was timed is not the step alone."""


class Table:
    """Rows of a table, and the effects that its constants have."""

    def __init__(self, name: str, rows: Sequence[Row]) -> None:
        device = rows[0].cluster.device
        self.name, self.rows = name, list(rows)
        software = SOFTWARE[rows[0].software]
        self.base = usual(software, device).replace(software=software.name)
        self.shared = effects_of(software, device)
        self.effects = {**self.shared, f"table {name}": 1.0}
        self.log_seconds = np.log([row.seconds for row in rows])
        self.is_fitted = name not in SCORED_ONLY

    @cached_property
    def groups(self) -> RowGroups:
        """The rows as tables of layouts."""
        return RowGroups.of(self.rows)

    def off(self, at: Floats) -> Floats:
        """log(measured / predicted) of each row."""
        return self.log_seconds - np.log(self.groups.seconds(moved(self.base, at)))

    def linear(self, at: Floats) -> tuple[Floats, Floats]:
        """log(measured / predicted) of each row, and the slopes of the logarithm of predicted times."""
        log, slope = slopes(self.groups.seconds, self.base, at)
        return self.log_seconds - log, slope


def table(name: str, rows: Sequence[Row]) -> Table:
    """A table with at most `MOST_ROWS` of its rows, drawn at random."""
    order = np.random.default_rng(0).permutation(len(rows))[:MOST_ROWS]
    return Table(name, [rows[place] for place in sorted(order)])


def all_tables(folder: Path) -> list[Table]:
    """The tables in the files of a folder, and those that ship."""
    blocks = json.loads((folder / "published.json").read_text("utf-8"))
    found = load(folder / "published.json")
    foundry = found.pop("llm_foundry_benchmarks")
    for chip in ("a100", "h100"):
        found[f"LLM Foundry, {chip}"] = [row for row in foundry if row.cluster.device.name.startswith(chip)]
    found |= more.rows(json.loads((folder / "more_points.json").read_text("utf-8"))["rows"])
    found["Sailor, GH200"] = small.sailor(blocks["sailor_validation"], "Sailor, GH200")
    found["Mist, L4"] = small.mist(blocks["mist_l4"], "Mist, L4")
    return [table(name, rows) for name, rows in (found | published()).items()]
