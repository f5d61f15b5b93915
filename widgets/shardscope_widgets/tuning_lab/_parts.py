"""Widgets that ipywidgets lacks: rows of settings to search, and a table of trials."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.resources import files
from typing import Any

import anywidget
import traitlets as t

_HERE = files(__package__)


class SpacePicker(anywidget.AnyWidget):
    """Rows of settings; `state` holds which are on and the picked options of each."""

    _esm = _HERE.joinpath("space.js").read_text(encoding="utf-8")
    _css = _HERE.joinpath("tuning.css").read_text(encoding="utf-8")
    rows: t.List[Mapping[str, Any]] = t.List(help="What there is to choose, in order.").tag(sync=True)
    state = t.Dict(help="By name: whether it is on, and places in its options.").tag(sync=True)
    hidden: t.List[str] = t.List(help="Names of rows that mean nothing now.").tag(sync=True)
    locked = t.Bool(help="Whether nothing can be changed.").tag(sync=True)
    fixed = t.Bool(help="Whether the rows cannot be switched off.").tag(sync=True)


class TrialTable(anywidget.AnyWidget):
    """Rows of trials, sorted and filtered in the browser, one of which can be chosen; redrawn cell by cell."""

    _esm = _HERE.joinpath("trials.js").read_text(encoding="utf-8")
    header = t.List(t.Unicode()).tag(sync=True)
    texts = t.List(t.Int(), help="Places of the columns that hold words.").tag(sync=True)
    query = t.Unicode("", help="Which rows to show: words, or columns with bounds such as lr<0.01.").tag(
        sync=True
    )
    rows: t.List[Mapping[str, Any]] = t.List(help="number, state, cells, and keys to sort by.").tag(sync=True)
    chosen = t.Int(-1, help="Number of the trial; -1 for none.").tag(sync=True)
