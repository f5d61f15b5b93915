"""The Twin's widgets and their layout; this module draws the data it receives and makes no decisions."""

from __future__ import annotations

from importlib.resources import files

import ipywidgets as widgets

from shardscope.measure.compare.comparison import Comparison, interval_text, notes_of, table_of
from shardscope.measure.compare.residual import Residual
from shardscope_widgets.figures import _residual, _twin, theme
from shardscope_widgets.kit.frame import LAB_CSS, Frame
from shardscope_widgets.kit.live_figure import LiveFigure
from shardscope_widgets.kit.markup import classed, heading, status_html, words_html
from shardscope_widgets.kit.own_code import predict_button
from shardscope_widgets.kit.run_chooser import RunChooser
from shardscope_widgets.kit.swatch import chip
from shardscope_widgets.words import safe

ABOUT = "a run three ways: predicted by formulas, simulated, and measured on real ranks"
_ROWS = (
    "For each rank, the measured step is above the simulated one; in both, computation is above communication, and "
    "grey is idle time."
)


class TwinFrame(Frame):
    """The heading of the panel, with its style sheet."""

    _css = LAB_CSS + files(__package__).joinpath("twin.css").read_text(encoding="utf-8")


class Screen:
    """All widgets of the panel, with the list of runs from which the user chooses."""

    def __init__(self, chooser: RunChooser) -> None:
        self.frame = TwinFrame(title="Twin", about=ABOUT)
        self.run, self.again = chooser.control, chooser.again
        self.where = widgets.Dropdown(
            description="Predicted for", tooltip="Cluster of the prediction and the simulation"
        )
        self.against = widgets.ToggleButtons(
            options=["predicted", "simulated"], tooltips=["Formulas", "Event-level simulation"]
        )
        self.step = widgets.SelectionSlider(
            description="Step", options=[("typical", 0)], continuous_update=True, tooltip="The measured step"
        )
        self.status, self.table, self.notes, self.explained, self.legend, self.words = (
            widgets.HTML() for _ in range(6)
        )
        self.residual = LiveFigure(
            _residual.empty_residual(), label="What explains the difference in step time"
        )
        self.gantt = LiveFigure(
            _twin.empty_twin().update_layout(showlegend=False, margin_t=8), label="One step on each rank"
        )
        self.call = predict_button()
        self.details = self._details()
        self.children = self._arrange()

    def _details(self) -> widgets.VBox:
        left = widgets.VBox([heading("Term by term"), self.table, self.notes])
        bar = classed(widgets.HBox([self.against]), "ss-twin-against")
        right = widgets.VBox([heading("What explains the difference"), bar, self.residual, self.explained])
        both = classed(widgets.HBox([left, right]), "ss-twin-both")
        steps = classed(widgets.HBox([self.step]), "ss-twin-step")
        return widgets.VBox([
            both, heading("One step on each rank", _ROWS), steps, self.legend, self.gantt, self.words,
        ])  # fmt: skip

    def _arrange(self) -> tuple[widgets.Widget, ...]:
        bar = classed(widgets.HBox([self.run, self.where, self.again]), "ss-run-bar")
        return self.frame, bar, self.status, self.call, self.details

    def say(self, text: str, state: str = "") -> None:
        """Set the status line."""
        self.status.value = status_html(text, state)

    def hide(self) -> None:
        """Hide everything below the status line."""
        self.details.layout.display = "none"

    def draw_comparison(self, found: Comparison) -> None:
        """Draw the table and its notes."""
        said = "".join(f"<div>{safe(line)}</div>" for line in interval_text(found))
        self.table.value = f'<div class="ss-words">{said}</div>{table_of(found).html()}'
        self.notes.value = notes_of(found).html()
        self.details.layout.display = None

    def draw_residual(self, found: Residual | None) -> None:
        """Draw the waterfall chart of the step time; if `found` is None, show why there is none."""
        self.residual.layout.display = "none" if found is None else None
        if found is None:
            self.explained.value = words_html("The step time of this run cannot be divided into parts.")
            return
        info = _residual.residual_info(found)
        self.residual.show_parts(*_residual.residual_parts(info))
        self.explained.value = words_html(info.sentence, is_live=True)

    def draw_step(self, info: _twin.TwinInfo) -> None:
        """Draw one step of each rank, with a legend that wraps."""
        traces, layout = _twin.twin_parts(info)
        self.gantt.show_parts(traces, layout)
        self.gantt.layout.display = None if info.rows else "none"
        named = [trace for trace in traces if trace["showlegend"]]
        self.legend.value = f'<div class="ss-legend">{"".join(map(_key, named if info.rows else []))}</div>'
        self.words.value = words_html(_twin.twin_text(info), is_live=True)


def _key(trace: dict[str, object]) -> str:
    marker = trace["marker"]
    assert isinstance(marker, dict)
    pattern = marker.get("pattern", {}).get("shape", "")
    return f"<span>{chip(theme.RunStyle(marker['color'], pattern=pattern))}{safe(trace['name'])}</span>"
