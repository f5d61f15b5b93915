"""The pieces of reStructuredText of which the pages of the reference are made."""

from __future__ import annotations

from collections.abc import Iterable


def title(text: str, line: str = "=") -> str:
    """Return a heading: of the page, or with ``-`` of a section."""
    return f"{text}\n{line * len(text)}\n\n"


def toctree(entries: Iterable[str], caption: str = "") -> str:
    """Return what puts pages below this one in the side bar: names, or titles and names as ``title <name>``."""
    option = f"   :caption: {caption}\n" if caption else ""
    return f".. toctree::\n   :hidden:\n{option}\n" + "".join(f"   {entry}\n" for entry in entries) + "\n"


def cards(entries: Iterable[tuple[str, str]]) -> str:
    """Return boxes that lead to pages: names, or titles and names as ``title <name>``, and what the pages have."""
    boxes = "".join(
        f"   .. container:: card\n\n      :doc:`{name}`\n\n      {about}\n\n" for name, about in entries
    )
    return f".. container:: cards\n\n{boxes}"


def table(rows: Iterable[tuple[str, str]]) -> str:
    """Return a table of names and what they are."""
    text = "".join(f"   * - {name}\n     - {about}\n" for name, about in rows)
    return f".. list-table::\n   :class: names\n\n{text}\n" if text else ""
