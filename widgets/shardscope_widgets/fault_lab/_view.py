"""The timeline of a run's faults, with its legend above and a description below."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import ipywidgets as widgets

from shardscope_widgets.figures import _faults, _faults_plot, theme
from shardscope_widgets.kit.live_figure import LiveFigure
from shardscope_widgets.kit.markup import classed, words_html
from shardscope_widgets.kit.swatch import chip
from shardscope_widgets.trace import Trace
from shardscope_widgets.words import safe

_SYMBOLS = {"x": "✕", "diamond": "◆", "diamond-open": "◇", "triangle-down": "▼"}


class FaultsView:
    """Widgets of the timeline. They draw the run passed to `draw`; the lab decides which run that is."""

    def __init__(self) -> None:
        self.legend, self.words = widgets.HTML(), widgets.HTML()
        template = _faults_plot.empty_faults().update_layout(showlegend=False, margin_t=10)
        self.figure = LiveFigure(template, label="What each rank did, and which steps were lost")
        self.box = classed(widgets.VBox([self.legend, self.figure, self.words]), "ss-faults-view")
        self.info: _faults.FaultsInfo | None = None

    def draw(self, trace: Trace | None) -> None:
        """Draw the timeline of a run so far; None clears it."""
        info = None if trace is None else _faults.faults_info(trace)
        if info is not None and info == self.info:
            return
        self.info = info
        is_empty = info is None or not info.bars
        self.figure.layout.display = "none" if is_empty else None
        self.words.value = words_html("" if info is None else _faults.faults_text(info), is_live=True)
        if info is None or is_empty:
            self.legend.value = ""
            return
        traces, layout = _faults_plot.faults_parts(info)
        self.figure.show_parts(traces, layout)
        keys = "".join(_key(each) for each in traces if each.get("showlegend"))
        self.legend.value = f'<div class="ss-legend">{keys}</div>'


def _key(trace: Mapping[str, Any]) -> str:
    marker, name = trace["marker"], safe(trace["name"])
    if trace["type"] == "scatter":
        return f'<span><b class="ss-mark" style="color:{marker["color"]}">{_SYMBOLS[marker["symbol"]]}</b>{name}</span>'
    return f"<span>{chip(theme.RunStyle(marker['color'], pattern=marker['pattern']['shape']))}{name}</span>"
