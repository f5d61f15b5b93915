"""The calculator's heading, which also loads its style sheet."""

from __future__ import annotations

from importlib.resources import files

from shardscope_widgets.kit.frame import Frame

_OWN = files(__package__).joinpath("memory.css").read_text(encoding="utf-8")


class Heading(Frame):
    """The lab's heading with the calculator's styles added."""

    _css = f"{Frame._css}\n{_OWN}"  # noqa: SLF001
