"""A select box with grouped entries, which ipywidgets does not provide."""

from __future__ import annotations

from importlib.resources import files

import anywidget
import traitlets as t


class Picker(anywidget.AnyWidget):
    """A select box with grouped entries; `value` is the selected entry."""

    _esm = files(__package__).joinpath("picker.js").read_text(encoding="utf-8")
    description = t.Unicode("").tag(sync=True)
    tooltip = t.Unicode("").tag(sync=True)
    value = t.Unicode("").tag(sync=True)
    groups: t.List[list[object]] = t.List(help="(group name, entries) pairs.").tag(sync=True)
