"""The Planner's widgets and their layout; this module draws the data it receives and makes no decisions."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from importlib.resources import files
from typing import Any

import anywidget
import ipywidgets as widgets
import plotly.graph_objects as go
import traitlets as t

from shardscope.errors import SpecError
from shardscope.planner import PlanComparison, Plans
from shardscope.planner.table import KEY, table_rows
from shardscope_widgets.figures import _plans
from shardscope_widgets.kit.click_figure import ClickFigure
from shardscope_widgets.kit.frame import Frame
from shardscope_widgets.kit.live_figure import LiveFigure
from shardscope_widgets.kit.markup import classed, columns, heading, note_html, status_html, words_html
from shardscope_widgets.kit.script import script
from shardscope_widgets.planner._hold_fixed import FILTERS, LABELS
from shardscope_widgets.planner._measured import MeasuredBox
from shardscope_widgets.words import safe

_EMPTY = _plans.PlansInfo((), (), 0.0)
ABOUT = "every layout of a model on a cluster, ranked by predicted cost; no training is run"


class PlanTable(anywidget.AnyWidget):
    """A table of text in which one row is selected."""

    _esm = script(__package__, "table.js")
    _css = files(__package__).joinpath("planner.css").read_text(encoding="utf-8")
    header = t.List(t.Unicode()).tag(sync=True)
    rows = t.List(t.List(t.Unicode())).tag(sync=True)
    chosen = t.Int(1, help="Number of the selected row, from 1.").tag(sync=True)


class PlannerScreen:
    """All widgets of a planner, arranged around its controls."""

    def __init__(self, controls: Mapping[str, Mapping[str, widgets.Widget]]) -> None:
        self.status, self.problem, self.told, self.note, self.config = (widgets.HTML() for _ in range(5))
        self._info, self._dots = _EMPTY, _plans.scatter(_EMPTY)
        empty = go.Figure()
        self.scatter, self.terms, self.rejected = ClickFigure(empty), LiveFigure(empty), LiveFigure(empty)
        self.table, self.measured = PlanTable(), MeasuredBox()
        self.children = self._arrange(controls)

    def _arrange(self, controls: Mapping[str, Mapping[str, widgets.Widget]]) -> tuple[widgets.Widget, ...]:
        scroll = classed(widgets.VBox([self.table]), "ss-plan-scroll")
        beside = heading("The chosen plan next to the best")
        key = widgets.HTML(note_html(f"{KEY}."))
        config = heading("Run the chosen plan")
        asked = heading("A step that you measured", "of the chosen plan")
        self.answer = widgets.VBox(
            [scroll, key, beside, self.terms, self.told, config, self.config, asked, self.measured.box]
        )
        self.left_out = widgets.VBox(
            [heading("Layouts that are not in the table", "by reason"), self.rejected]
        )
        right = widgets.VBox([self.status, self.problem, self.note, self.scatter])
        frame = Frame(title="Planner", about=ABOUT)
        return frame, columns(_controls_box(controls), right), self.answer, self.left_out

    def say(self, text: str, *, state: str) -> None:
        """Set the status line at the top."""
        self.status.value = status_html(text, state)

    def draw_search(self, plans: Plans) -> None:
        """Draw the parts that change only with a new search: rejections and the calibration note."""
        self._info = _plans.plans_info(plans)
        self._dots = _plans.scatter(self._info)
        self.rejected.figure = _plans.rejected(plans.rejected)
        self.left_out.layout.display = None
        self.note.value = note_html(_as_in_form(f"{plans.caveat[0].upper()}{plans.caveat[1:]}."))

    def draw_ranking(self, plans: Plans, chosen: int, *, tokens: float) -> None:
        """Draw the parts that depend on the ranking or the chosen plan: the table and the scatter plot.

        Args:
            plans: Result of the search.
            chosen: Position of the chosen plan in the ranking, from 1.
            tokens: Number of tokens to train on, for the time and the cost.
        """
        self.answer.layout.display = self.scatter.layout.display = None
        header, rows = table_rows(plans, tokens=tokens)
        with self.table.hold_sync():
            self.table.header, self.table.rows, self.table.chosen = list(header), rows, chosen
        best, kept = (int(plans.order[rank - 1]) if len(plans) else None for rank in (1, chosen))
        rings = _plans.rings(self._info, best=best, chosen=kept)
        self.scatter.figure = self._dots | {"data": [*self._dots["data"], *rings]}

    def draw_chosen(self, plans: Plans, chosen: int, explanation: PlanComparison | None) -> None:
        """Draw the comparison of the chosen plan (`chosen` is its position in the ranking, from 1) with the best."""
        self.terms.figure = _plans.terms(_plans.terms_info(plans, (1, chosen)))
        self.told.value = _told(explanation)
        self.config.value = _config_html(plans, chosen)

    def draw_nothing(self) -> None:
        """Hide all results except the numbers of rejected layouts, because no layout fits."""
        self.answer.layout.display = self.scatter.layout.display = "none"
        self.table.rows = []
        self.scatter.figure, self.told.value = self._dots, ""

    def draw_failed(self) -> None:
        """Clear all results after a search that failed."""
        self._info, self._dots = _EMPTY, _plans.scatter(_EMPTY)
        self.left_out.layout.display = "none"
        self.note.value = ""
        self.draw_nothing()


def _told(explanation: PlanComparison | None) -> str:
    if explanation is None:
        return words_html("Choose a row or a point to see why that plan is slower than the best.")
    head, *rest = map(safe, explanation.sentences)
    return f'<div class="ss-told"><b>{head}</b><ul>{"".join(f"<li>{line}</li>" for line in rest)}</ul></div>'


_IN_FORM: dict[str, str | Callable[[re.Match[str]], str]] = {
    r"give software=\.\.\. for another": "choose another under Framework",
    r"plan with fix=\{'recompute_layers': 0\}": "hold Recompute fixed at full",
    r"plan with fix=\{'(\w+)': '?([\w-]+)'?\}": lambda found: f"hold {_label(found[1])} fixed at {found[2]}",
    r"plan with software='([^']*)'": r"choose \1 under Framework",
    r", or software='([^']*)'": r", or choose \1 under Framework",
    r"and without that in fix": "and do not hold that fixed",
    r"software='([^']*)' searches": r"Framework \1 searches",
    r"software='([^']*)'": r"framework \1",
}
"""Replacements for arguments of `ss.plan` in the toolkit's sentences, by regular expression, in the order applied."""


def _label(axis: str) -> str:
    return LABELS.get(axis, axis.capitalize())


def _as_in_form(text: str) -> str:
    """Return a sentence with the form's words instead of the arguments of `ss.plan`."""
    for pattern, words in _IN_FORM.items():
        text = re.sub(pattern, words, text)
    return re.sub(
        rf"\b({'|'.join(FILTERS)})='?([\w-]+)'?", lambda found: f"{_label(found[1])} {found[2]}", text
    )


def _config_html(plans: Plans, chosen: int) -> str:
    """Return the settings of the chosen plan's framework, or why there are none."""
    try:
        config = plans.trainer_config(chosen)
    except SpecError as error:
        return words_html(f"No settings to paste: {_as_in_form(str(error))}.")
    return (
        f'<details class="ss-config"><summary>Settings for {safe(config.trainer)}</summary>'
        f"<pre>{safe(config.text)}</pre></details>{note_html(_as_in_form(' '.join(config.remarks)))}"
    )


def _controls_box(controls: Mapping[str, Mapping[str, Any]]) -> widgets.VBox:
    boxes: list[widgets.Widget] = []
    for title, group in controls.items():
        sliders = title == "What counts"
        box = widgets.VBox(list(group.values())) if sliders else widgets.GridBox(list(group.values()))
        box.add_class("ss-weights" if sliders else "ss-controls")
        boxes += [heading(title), box]
    return widgets.VBox(boxes)
