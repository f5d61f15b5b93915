"""A text to paste elsewhere, with a button that copies it."""

from __future__ import annotations

from importlib.resources import files

import anywidget
import traitlets as t


class Copied(anywidget.AnyWidget):
    """A title, a button that copies `text`, and the text."""

    _esm = "".join(
        files(__package__).joinpath(name).read_text(encoding="utf-8") for name in ("copy.js", "copied.js")
    )
    title = t.Unicode("").tag(sync=True)
    text = t.Unicode("").tag(sync=True)
