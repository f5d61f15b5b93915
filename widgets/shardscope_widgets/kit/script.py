"""Scripts of widgets, each as a single text, as anywidget requires."""

from __future__ import annotations

from importlib.resources import files

_ON_CHANGE = files(__package__).joinpath("changes.js").read_text(encoding="utf-8")


def script(package: str, name: str) -> str:
    """Return the script `name` of a package, preceded by the function `onChange`, which observes traits for it."""
    return _ON_CHANGE + files(package).joinpath(name).read_text(encoding="utf-8")
