"""A tree of terms as text and as collapsible HTML."""

from __future__ import annotations

from html import escape

from shardscope.analytic.terms import Term

_STEPS = {
    "s": ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs")),
    "bytes": ((2**50, "PiB"), (2**40, "TiB"), (2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB"), (1.0, "B")),
}


def suitable_unit(value: float, unit: str) -> tuple[float, str]:
    """Return the size and name of the most readable unit for a value: 0.02 s gives ``(0.001, "ms")``."""
    return next((step for step in _STEPS.get(unit, ()) if abs(value) >= step[0]), (1.0, unit))


def figure(value: float, unit: str) -> str:
    """Format a value with four digits and a suitable unit: ``18.13 s``, ``1.25 GiB``."""
    size, name = suitable_unit(value, unit)
    return f"{value / size:.4g} {name}"


def term_text(term: Term, depth: int = 0) -> str:
    """Format one line per term with its share of the whole, and its parts indented below.

    For a maximum, only the largest part is shown.
    """
    return "\n".join(_lines(term, depth, term.value))


def _lines(term: Term, depth: int, whole: float) -> list[str]:
    share = f"{term.value / whole:7.1%}" if whole else " " * 7
    name = "  " * depth + term.name
    line = f"{name:<38} {figure(term.value, term.unit):>12} {share}  {term.formula}".rstrip()
    parts = term.parts if term.how == "sum" else (max(term.parts, key=lambda part: part.value),)
    return [line, *(below for part in parts for below in _lines(part, depth + 1, whole))]


def term_html(term: Term) -> str:
    """Return nested HTML ``<details>``: closed, name and value; open, the parts, or formula, inputs and source."""
    head = f"{escape(term.name)}: <strong>{escape(figure(term.value, term.unit))}</strong>"
    if term.parts:
        inside = "".join(term_html(part) for part in term.parts)
    else:
        inputs = ", ".join(f"{escape(k)} = {escape(_short(v))}" for k, v in term.inputs.items())
        inside = (
            f"<div><code>{escape(term.formula)}</code><br>{inputs}<br><em>{escape(term.source)}</em></div>"
        )
    return (
        f"<details style='margin-left:1em'><summary>{head}</summary>"
        f"<div style='margin-left:1em'>{inside}</div></details>"
    )


def _short(value: float | str) -> str:
    return value if isinstance(value, str) else f"{value:.6g}"
