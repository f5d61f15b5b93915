"""The planner's table."""

from __future__ import annotations

from importlib.resources import files

import anywidget
import traitlets as t


class PlanTable(anywidget.AnyWidget):
    """A table of text in which one row is selected."""

    _esm = files(__package__).joinpath("table.js").read_text(encoding="utf-8")
    _css = files(__package__).joinpath("planner.css").read_text(encoding="utf-8")
    header = t.List(t.Unicode()).tag(sync=True)
    rows = t.List(t.List(t.Unicode())).tag(sync=True)
    chosen = t.Int(1, help="Number of the selected row, from 1.").tag(sync=True)
