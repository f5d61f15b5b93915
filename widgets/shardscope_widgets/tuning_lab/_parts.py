"""Widgets that ipywidgets lacks: rows of settings to search, and a table of trials."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.resources import files
from typing import Any

import anywidget
import traitlets as t

from shardscope_widgets.kit.script import script

_HERE = files(__package__)


class SpacePicker(anywidget.AnyWidget):
    """Rows of settings; `state` has the rows that are switched on and the picked options of each row."""

    _esm = script(__package__, "space.js")
    _css = _HERE.joinpath("tuning.css").read_text(encoding="utf-8")
    rows: t.List[Mapping[str, Any]] = t.List(help="Settings that can be searched, in order.").tag(sync=True)
    state = t.Dict(
        help="For each setting, by name: whether it is on, and the indices of the picked options."
    ).tag(sync=True)
    hidden: t.List[str] = t.List(help="Names of rows that currently have no effect.").tag(sync=True)
    locked = t.Bool(help="Whether all inputs are disabled.").tag(sync=True)
    fixed = t.Bool(help="Whether the rows cannot be switched off.").tag(sync=True)


class TrialTable(anywidget.AnyWidget):
    """A table of trials, sorted and filtered in the browser, in which one row can be chosen; updated cell by cell."""

    _esm = script(__package__, "trials.js")
    header = t.List(t.Unicode()).tag(sync=True)
    texts = t.List(t.Int(), help="Indices of the columns that hold text.").tag(sync=True)
    query = t.Unicode("", help="Filter for the rows: words, or columns with bounds such as lr<0.01.").tag(
        sync=True
    )
    rows: t.List[Mapping[str, Any]] = t.List(help="Number, state, cells and sort keys of each trial.").tag(
        sync=True
    )
    chosen = t.Int(-1, help="Number of the chosen trial; -1 for none.").tag(sync=True)
