"""Text in SVG: the few tags that Plotly's labels may contain, line breaks, and an estimate of the width."""

from __future__ import annotations

import html
import re

_TAG = re.compile(r"<(/?)(b|i|em|strong|span|sup|sub)\b([^>]*)>")
_BREAK = re.compile(r"<br ?/?>")
_STYLES = {
    "b": "font-weight:700",
    "strong": "font-weight:700",
    "i": "font-style:italic",
    "em": "font-style:italic",
}
DEFAULT = 12
"""Font size of an image in pixels."""
LINE = 1.3
"""Height of a line as a multiple of the font size."""


def lines_of(text: object) -> list[str]:
    """Return the lines of a label."""
    return _BREAK.split(str(text))


def text_size(text: object, size: float) -> tuple[float, float]:
    """Return the estimated width, and the height, of a label in pixels."""
    lines = lines_of(text)
    return max(len(html.unescape(_TAG.sub("", line))) for line in lines) * size * 0.54, len(
        lines
    ) * size * LINE


def text_svg(
    text: object, x: float, y: float, *, size: float = 12, colour: str = "", anchor: str = "start", up: float = 0.5,
    angle: float = 0,
) -> str:  # fmt: skip
    """Return a label as SVG.

    Args:
        text: The label, which may contain Plotly's tags.
        x: Position of its start, middle or end, depending on `anchor`.
        y: Position of its top (`up` 0), middle (0.5) or bottom (1).
        size: Font size in pixels.
        colour: Colour; if empty, the figure's colour.
        anchor: Horizontal alignment: ``start``, ``middle`` or ``end``.
        up: Share of the label's height that is above `y`.
        angle: Rotation in degrees, clockwise.
    """
    lines = lines_of(text)
    first = y - up * len(lines) * size * LINE + size * (LINE + 0.72) / 2
    style = f' font-size="{size:g}"' if size != DEFAULT else ""
    style += f' text-anchor="{anchor}"' if anchor != "start" else ""
    style += f' fill="{colour}"' if colour else ""
    style += f' transform="rotate({angle:g} {x:.1f} {y:.1f})"' if angle else ""
    if len(lines) == 1:
        return f'<text x="{x:.1f}" y="{first:.1f}"{style}>{_marked(lines[0])}</text>'
    spans = "".join(
        f'<tspan x="{x:.1f}" y="{first + at * size * LINE:.1f}">{_marked(line)}</tspan>'
        for at, line in enumerate(lines)
        if line.strip()
    )
    return f"<text{style}>{spans}</text>"


def _marked(line: str) -> str:
    """Return a line with its tags converted to spans; unclosed tags end with the line."""
    found, depth, at = "", 0, 0
    for tag in _TAG.finditer(line):
        found += html.escape(html.unescape(line[at : tag.start()]), quote=False)
        at = tag.end()
        if tag[1]:
            found += "</tspan>" * (depth > 0)
            depth = max(0, depth - 1)
            continue
        style = re.search(r"style=['\"]([^'\"]*)", tag[3])
        css = _STYLES.get(tag[2], "") if style is None else re.sub(r"\bcolor:", "fill:", style[1])
        found, depth = f'{found}<tspan style="{html.escape(css)}">', depth + 1
    return found + html.escape(html.unescape(line[at:]), quote=False) + "</tspan>" * depth
