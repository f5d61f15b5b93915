"""A select box with grouped entries, which ipywidgets does not provide."""

from __future__ import annotations

from importlib.resources import files

import anywidget
import traitlets as t


class Picker(anywidget.AnyWidget):
    """A select box with groups; `value` is one of the entries."""

    _esm = files(__package__).joinpath("picker.js").read_text(encoding="utf-8")
    description = t.Unicode("").tag(sync=True)
    tooltip = t.Unicode("").tag(sync=True)
    value = t.Unicode("").tag(sync=True)
    groups: t.List[list[object]] = t.List(help="Pairs of a group's name and its entries.").tag(sync=True)
