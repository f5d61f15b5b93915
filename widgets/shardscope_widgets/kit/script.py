"""Scripts of widgets, as anywidget takes them: one text each."""

from __future__ import annotations

from importlib.resources import files

_ON_CHANGE = files(__package__).joinpath("changes.js").read_text(encoding="utf-8")


def script(package: str, name: str) -> str:
    """Return the script `name` of a package after the function `onChange`, with which it follows its traits."""
    return _ON_CHANGE + files(package).joinpath(name).read_text(encoding="utf-8")
