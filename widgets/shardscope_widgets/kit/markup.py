"""HTML and boxes that all widgets use: lines of text, headings, and the two columns of a lab.

Texts are escaped here; tables are those of `shardscope.show`.
"""

from __future__ import annotations

from typing import TypeVar

import ipywidgets as widgets

from shardscope_widgets.words import safe

_Box = TypeVar("_Box", bound=widgets.DOMWidget)


def words_html(text: object, *, is_live: bool = False) -> str:
    """Return a line of explanation; if `is_live`, screen readers read out its changes. Empty if there is no text."""
    role = ' role="status"' if is_live else ""
    return f'<div class="ss-words"{role}>{safe(text)}</div>' if text else ""


def note_html(text: object, *, is_bad: bool = False) -> str:
    """Return a line in small print, in the colour of errors if `is_bad`."""
    return f'<div class="ss-note{" bad" * is_bad}">{safe(text)}</div>'


def status_html(text: object, state: str = "") -> str:
    """Return a status line, whose dot has the colour of `state`, such as ``running`` or ``failed``."""
    return f'<div class="ss-status {state}" role="status">{safe(text)}</div>'


def heading_html(text: str, about: object = "") -> str:
    """Return a heading, followed by an explanation in small print."""
    more = f" <span>{safe(about)}</span>" if about else ""
    return f'<h3 class="ss-heading">{safe(text)}{more}</h3>'


def heading(text: str, about: object = "") -> widgets.HTML:
    """Return a heading as a widget."""
    return widgets.HTML(heading_html(text, about))


def classed(box: _Box, *names: str) -> _Box:
    """Add CSS classes to a widget, and return the widget."""
    for name in names:
        box.add_class(name)
    return box


def columns(left: widgets.DOMWidget, right: widgets.DOMWidget) -> widgets.HBox:
    """Return the two columns of a lab: inputs on the left, results on the right."""
    return classed(widgets.HBox([classed(left, "ss-left"), classed(right, "ss-right")]), "ss-main")
