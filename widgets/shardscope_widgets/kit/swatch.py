"""Legend samples: a dashed line for a run, and a square with a pattern for a type of span."""

from __future__ import annotations

from shardscope_widgets.figures.theme import RunStyle

_DASH_ARRAYS = {
    "dash": "6 3",
    "dot": "2 3",
    "dashdot": "6 3 2 3",
    "longdash": "9 3",
    "longdashdot": "9 3 2 3",
}


def swatch(look: RunStyle | None) -> str:
    """Return a line sample as an SVG of 26 by 10 pixels; an empty space of the same size if `look` is None."""
    if look is None:
        return '<span class="ss-swatch"></span>'
    dash = _DASH_ARRAYS.get(look.dash)
    array = f' stroke-dasharray="{dash}"' if dash else ""
    line = f'<line x1="1" y1="5" x2="25" y2="5" stroke="{look.colour}" stroke-width="3"{array}/>'
    size = 'style="max-width:none;margin-right:7px" width="26" height="10"'
    return f'<svg class="ss-swatch" {size} aria-hidden="true">{line}</svg>'


def chip(look: RunStyle) -> str:
    """Return a square in the colour of `look`, striped like the pattern of its bars."""
    angle = {"/": "135deg", "\\": "45deg", "-": "0deg", "x": "90deg"}.get(look.pattern)
    stripes = (
        f"repeating-linear-gradient({angle},transparent 0 3px,rgba(255,255,255,.55) 3px 4px),"
        if angle
        else ""
    )
    return f'<i class="ss-chip" style="background:{stripes}{look.colour}"></i>'
