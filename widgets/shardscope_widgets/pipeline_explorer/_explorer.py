"""The Pipeline Explorer widget: choices as traits, and the figure and table computed from them."""

from __future__ import annotations

from importlib.resources import files
from typing import Any

import anywidget
import ipywidgets as widgets
import plotly.graph_objects as go
import traitlets as t

from shardscope.analytic.schedules import Timeline, build
from shardscope.errors import ShardscopeError, SpecError
from shardscope.spec.pipeline_schedule import PipelineSchedule
from shardscope_widgets.figures._schedule import ScheduleInfo, schedule_info, schedule_json, schedule_text
from shardscope_widgets.kit.frame import Frame
from shardscope_widgets.kit.live_figure import LiveFigure
from shardscope_widgets.pipeline_explorer._comparison import comparison_html, comparison_info
from shardscope_widgets.pipeline_explorer._controls import MOST_MICROBATCHES, MOST_RANKS, make_controls, panel
from shardscope_widgets.words import safe, seconds_text

NOTE = (
    "By the closed forms, or counted where there are none: stages of equal cost, sending free, and all ranks meeting "
    "between steps. Hover over a name for the idea and its source."
)


class Style(anywidget.AnyWidget):
    """The explorer's style sheet, in addition to the lab's, which the heading loads."""

    _esm = "export default {};"
    _css = files(__package__).joinpath("explorer.css").read_text(encoding="utf-8")


class PipelineExplorer(widgets.VBox):  # type: ignore[misc]
    """Choose a schedule and its numbers; see every operation, the bubble, and the activations that each rank holds.

    Args:
        choices: Initial values of any traits.

    Example:
        >>> explorer = PipelineExplorer(schedule="zbv", stages=4, microbatches=8)  # doctest: +SKIP
        >>> explorer.timeline.bubble_fraction  # what the figure shows
    """

    schedule = t.Unicode("1f1b", help="The order in which each rank works.")
    stages = t.Int(4, min=1, max=MOST_RANKS, help="Ranks, one behind the other.")
    microbatches = t.Int(8, min=1, max=MOST_MICROBATCHES, help="Micro-batches of a step.")
    virtual_stages = t.Int(
        2, min=1, max=4, help="Stages of each rank; only interleaved schedules leave the choice."
    )
    t_f = t.Float(10.0, help="Milliseconds of a micro-batch's forward pass on all stages of a rank.")
    t_input = t.Float(10.0, help="Milliseconds of its backward pass for inputs.")
    t_weight = t.Float(10.0, help="Milliseconds of its backward pass for weights.")
    send = t.Float(
        0.0, help="Milliseconds from the end of an operation to its result's arrival on another rank."
    )
    last_stage = t.Float(
        1.0, help="What the last stage takes, as a multiple of the others: it has the output layer."
    )
    freed_by_input = t.Float(
        0.0, help="Part of the activations that the backward pass for inputs already frees."
    )

    def __init__(self, **choices: Any) -> None:
        known = self.class_own_traits()
        unknown = sorted(set(choices) - set(known))
        if unknown:
            raise TypeError(
                f"PipelineExplorer has no choice {unknown[0]!r}; there are {', '.join(sorted(known))}"
            )
        super().__init__(**choices)
        self.timeline: Timeline | None = None
        self.controls = make_controls(self)
        self._idea, self._status, self._words, self._table = (widgets.HTML() for _ in range(4))
        self.figure = LiveFigure(go.Figure())
        self.figure.add_class("ss-figure")
        heading = widgets.HTML(f'<div class="ss-heading">All schedules <span>{safe(NOTE)}</span></div>')
        right = widgets.VBox([self._status, self.figure, self._words, heading, self._table])
        right.add_class("ss-right")
        main = widgets.HBox([panel(self.controls, self._idea), right])
        main.add_class("ss-main")
        frame = Frame(
            title="Pipeline Explorer", about="What each rank does when, what it waits for, what it holds."
        )
        self.children = (frame, Style(), main)
        self.add_class("ss-lab")
        self.add_class("ss-explorer")
        self.observe(lambda _: self.refresh(), list(self.class_own_traits()))
        self.refresh()

    @t.validate("schedule")
    def _known_schedule(self, proposal: Any) -> str:
        try:
            return str(PipelineSchedule(proposal["value"]).name)
        except SpecError as error:
            raise t.TraitError(str(error)) from None

    @property
    def held(self) -> int:
        """Stages per rank: the chosen number if the schedule allows a choice, otherwise the schedule's own."""
        return PipelineSchedule(self.schedule).stages_of(self.virtual_stages)

    def refresh(self) -> None:
        """Recompute the schedule and redraw it."""
        schedule = PipelineSchedule(self.schedule)
        self.controls["virtual_stages"].layout.display = "none" if schedule.most_stages else None
        self._idea.value = (
            f'<div class="ss-idea">{safe(schedule.about())}<cite>{safe(schedule.source)}</cite></div>'
        )
        rows = comparison_info(
            self.stages, self.microbatches, virtual_stages=self.virtual_stages,
            t_f=self.t_f / 1e3, t_input=self.t_input / 1e3, t_weight=self.t_weight / 1e3,
        )  # fmt: skip
        self._table.value = comparison_html(rows, self.schedule)
        try:
            self.timeline = self._timeline()
        except ShardscopeError as error:
            self.timeline = None
            self._say(f'<div class="ss-status failed" role="status">{safe(error)}</div>', "")
            self.figure.layout.display = "none"
            return
        info = schedule_info(self.timeline, schedule=self.schedule, freed_by_input=self.freed_by_input)
        self._show(info, next(row.bubble for row in rows if row.name == self.schedule))

    def _timeline(self) -> Timeline:
        table = build(self.schedule, self.stages, self.microbatches, self.held)
        times = {"F": self.t_f / self.held, "I": self.t_input / self.held, "W": self.t_weight / self.held}
        uneven = [1.0] * (table.num_stages - 1) + [self.last_stage] if self.last_stage != 1 else None
        return table.timeline(times, stage_cost=uneven, send=self.send)

    def _show(self, info: ScheduleInfo, formula: float) -> None:
        against = self._against_formula(info, formula)
        status = f'<div class="ss-status completed" role="status">{safe(against)}</div>'
        self._say(status, schedule_text(info))
        self.figure.figure = schedule_json(info)
        self.figure.layout.display = None

    def _say(self, status: str, words: str) -> None:
        self._status.value = status
        self._words.value = f'<div class="ss-words">{safe(words)}</div>'

    def _against_formula(self, info: ScheduleInfo, formula: float) -> str:
        """The step time and bubble counted from the timeline, and the bubble by the closed form.

        The closed form assumes free sends and stages of equal cost.
        """
        counted = f"step {seconds_text(info.gantt.end_ms / 1e3)}, bubble {info.gantt.bubble:.1%} counted"
        if type(PipelineSchedule(self.schedule)).bubble is PipelineSchedule.bubble:
            return counted  # there is no closed form to compare with
        if abs(formula - info.gantt.bubble) < 5e-4:
            return f"{counted}, the same by the closed form"
        why = " with free sends and equal stages" if self.send or self.last_stage != 1 else ""
        return f"{counted}, {formula:.1%} by the closed form{why}"
