"""A drawer: inputs that are folded away behind one button, with a line that summarises their values."""

from __future__ import annotations

from importlib.resources import files

import anywidget
import ipywidgets as widgets
import traitlets as t

from shardscope_widgets.kit.markup import classed


class DrawerHead(anywidget.AnyWidget):
    """The button of a drawer and its summary."""

    _esm = files(__package__).joinpath("drawer.js").read_text(encoding="utf-8")
    label = t.Unicode("").tag(sync=True)
    summary = t.Unicode("", help="What is set in the drawer, in one line.").tag(sync=True)
    is_open = t.Bool(False, help="Whether the drawer is unfolded.").tag(sync=True)


def drawer(label: str, *inside: widgets.Widget) -> tuple[DrawerHead, widgets.VBox]:
    """Return the head of a drawer, for its summary and state, and the drawer itself, which is folded at first."""
    head = DrawerHead(label=label)
    body = classed(widgets.VBox(list(inside)), "ss-drawer-body")
    return head, classed(widgets.VBox([head, body]), "ss-drawer")
