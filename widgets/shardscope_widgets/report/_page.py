"""The shell of a report: one HTML file with its own style, script, figures and a compressed copy of Plotly.

`plotly-basic.min.js.gz` is Plotly's own basic bundle (MIT license), which draws bars and lines, and is a tenth of the
size of the whole library. The page decompresses the bundle and the figures, and draws each figure when it comes into
view.
"""

from __future__ import annotations

import base64
import gzip
import json
import re
from dataclasses import dataclass, field
from importlib.resources import files
from typing import Any

import plotly.graph_objects as go

from shardscope_widgets.words import safe

TRACE_TYPES = frozenset({"bar", "scatter", "pie"})
"""Types of traces that the basic bundle draws."""
_HERE = files("shardscope_widgets.report")
_PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark"><title>{title}</title><style>{style}</style></head>
<body><main>{body}</main>
<script type="application/gzip" id="figures">{figures}</script>
<script type="application/gzip" id="plotly">{plotly}</script>
<script>{script}</script></body></html>
"""


@dataclass
class Page:
    """The page under construction: its figures, and the headings for the table of contents.

    Attributes:
        figures: Figures as JSON, in the order of their places on the page.
        contents: (anchor, heading) of each section.
    """

    figures: list[dict[str, Any]] = field(default_factory=list)
    contents: list[tuple[str, str]] = field(default_factory=list)
    _anchors: set[str] = field(default_factory=set)

    def heading(self, level: int, text: str, *, within: str = "") -> str:
        """Return a heading with a permalink; headings of level 2 are also listed in the table of contents.

        Args:
            level: Level of the heading, from 2.
            text: The heading, as plain text.
            within: Enclosing heading, which is added to the anchor to make it unique.
        """
        anchor = self._anchor(f"{within} {text}")
        if level == 2:
            self.contents.append((anchor, text))
        link = f'<a class="permalink" href="#{anchor}" aria-label="Link to this section">#</a>'
        return f'<h{level} id="{anchor}">{safe(text)}{link}</h{level}>'

    def _anchor(self, text: str) -> str:
        plain = re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-") or "section"
        anchor, number = plain, 2
        while anchor in self._anchors:
            anchor, number = f"{plain}-{number}", number + 1
        self._anchors.add(anchor)
        return anchor

    def figure(self, figure: go.Figure, words: str) -> str:
        """Return the placeholder of a figure, with `words` as its caption."""
        found = json.loads(figure.to_json())
        unknown = {trace.get("type", "scatter") for trace in found["data"]} - TRACE_TYPES
        assert not unknown, f"the report's Plotly bundle cannot draw traces of type {unknown}"
        height = found["layout"].get("height", 300)
        self.figures.append(found)
        place = (
            f'<div class="plot" data-figure="{len(self.figures) - 1}" style="min-height:{height}px"></div>'
        )
        return f"<figure>{place}<figcaption>{safe(words)}</figcaption></figure>"

    def nav(self) -> str:
        """Return the table of contents."""
        links = "".join(f'<li><a href="#{anchor}">{safe(text)}</a></li>' for anchor, text in self.contents)
        return f'<nav aria-label="Contents"><ul>{links}</ul></nav>'

    def html(self, title: str, body: str) -> str:
        """Return the whole page as HTML."""
        return _PAGE.format(
            title=safe(title), style=_text("page.css"), body=body, script=_text("page.js"),
            figures=_packed(json.dumps(self.figures, separators=(",", ":")).encode()),
            plotly=base64.b64encode(_HERE.joinpath("plotly-basic.min.js.gz").read_bytes()).decode(),
        )  # fmt: skip


def _text(name: str) -> str:
    return _HERE.joinpath(name).read_text(encoding="utf-8")


def _packed(content: bytes) -> str:
    return base64.b64encode(gzip.compress(content, 9, mtime=0)).decode()
