"""Rendering of a tree of terms as text or as collapsible HTML."""

from __future__ import annotations

from html import escape

from shardscope.analytic.terms import Term
from shardscope.spec.units import scaled, three_digits

_STEPS = {
    "s": ((86400.0, "days"), (3600.0, "h"), (60.0, "min"), (1.0, "s"), (1e-3, "ms"), (1e-6, "µs")),
    "bytes": ((1e15, "PB"), (1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB"), (1.0, "B")),
    "GiB": ((2**40, "TiB"), (2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB"), (1.0, "B")),
    "FLOP": ((1e18, "EFLOP"), (1e15, "PFLOP"), (1e12, "TFLOP"), (1e9, "GFLOP"), (1e6, "MFLOP"), (1e3, "kFLOP")),
}  # fmt: skip
_COUNTS = {"T": 1e12, "G": 1e9, "M": 1e6}


def suitable_unit(value: float, unit: str) -> tuple[float, str]:
    """Return the size and the name of a readable unit for a value, such as ``(0.001, "ms")`` for 0.02 s.

    Bytes have units of 1000, unless `unit` is ``GiB``, for memory next to the capacity of a device.
    """
    return next((step for step in _STEPS.get(unit, ()) if abs(value) >= step[0]), (1.0, unit))


def figure(value: float, unit: str) -> str:
    """Format a value with three digits and a suitable unit, such as ``18.1 s`` or ``1.25 GB``."""
    size, name = suitable_unit(value, unit)
    return f"{three_digits(value / size)} {name}"


def term_text(term: Term, depth: int = 0, *, unit: str = "") -> str:
    """Format a tree as text, one line per term: name, value, percentage of the root's value, and formula.

    The parts of a term follow it, indented; if the term is a maximum, only its largest part is shown. `unit` replaces
    the unit of the terms, see `suitable_unit`.
    """
    return "\n".join(_lines(term, depth, term.value, unit))


def _lines(term: Term, depth: int, whole: float, unit: str) -> list[str]:
    """Return the lines of a term and its parts, with percentages of `whole`."""
    share = f"{term.value / whole:7.1%}" if whole else " " * 7
    name = "  " * depth + term.name
    line = f"{name:<38} {figure(term.value, unit or term.unit):>12} {share}  {term.formula}".rstrip()
    parts = term.parts if term.how == "sum" else (max(term.parts, key=lambda part: part.value),)
    return [line, *(below for part in parts for below in _lines(part, depth + 1, whole, unit))]


def term_html(term: Term, *, unit: str = "") -> str:
    """Format a tree as nested HTML ``<details>`` elements; `unit` is as in `term_text`.

    A closed element shows a term's name and value. An open one also shows its parts, or its formula, inputs and source.
    """
    head = f"{escape(term.name)}: <strong>{escape(figure(term.value, unit or term.unit))}</strong>"
    if term.parts:
        inside = "".join(term_html(part, unit=unit) for part in term.parts)
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
    """Format an input of a formula: ``126 M``, ``12,288`` or ``0.25``."""
    if isinstance(value, str):
        return value
    return scaled(value, _COUNTS) if abs(value) >= _COUNTS["M"] else f"{value:,.6g}"
