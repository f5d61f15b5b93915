"""The Pipeline Explorer widget: inputs as traits, and the figure and table computed from these inputs."""

from __future__ import annotations

from importlib.resources import files
from typing import Any

import ipywidgets as widgets
import plotly.graph_objects as go
import traitlets as t

from shardscope.analytic.schedules import Timeline, build
from shardscope.errors import ShardscopeError, SpecError
from shardscope.spec.pipeline_schedule import PipelineSchedule, schedules
from shardscope_widgets.figures._schedule import ScheduleInfo, schedule_info, schedule_json, schedule_text
from shardscope_widgets.kit.controls import controls_for
from shardscope_widgets.kit.form import check_options, in_groups, own_trait
from shardscope_widgets.kit.frame import LAB_CSS, Frame
from shardscope_widgets.kit.live_figure import LiveFigure
from shardscope_widgets.kit.markup import classed, columns, heading, status_html, words_html
from shardscope_widgets.kit.still import Still
from shardscope_widgets.pipeline_explorer._comparison import comparison_html, comparison_info
from shardscope_widgets.words import duration_text, safe

NOTE = (
    "Computed with closed-form formulas, or simulated where there is none, assuming stages of equal cost, no "
    "communication time and a barrier between steps. Hover over a name for a description and the source."
)


_GROUPS = {
    "Pipeline": ("stages", "microbatches", "virtual_stages"),
    "Time per micro-batch on a rank": ("t_f", "t_input", "t_weight"),
    "Beyond the textbook model": ("send", "last_stage", "freed_by_input"),
}
_TIME: dict[str, Any] = {"least": 0, "reach": 30, "step": 0.5, "slider": ".1f"}
"""Slider settings for a time in milliseconds."""


class _Frame(Frame):
    _css = LAB_CSS + files(__package__).joinpath("explorer.css").read_text(encoding="utf-8")


class PipelineExplorer(Still, widgets.VBox):  # type: ignore[misc]
    """Choose a schedule and its parameters; see every operation, the bubble, and the activations that each rank holds.

    Args:
        choices: Initial values of any traits.

    Example:
        >>> explorer = PipelineExplorer(schedule="zbv", stages=4, microbatches=8)
        >>> round(explorer.timeline.bubble_fraction, 3)  # as shown in the figure
        0.059
    """

    schedule = own_trait(
        "1f1b",
        "Schedule",
        "Order in which each rank runs its operations.",
        values=lambda: tuple((each.heading(), each.name) for each in schedules()),
    )
    stages = own_trait(4, "Ranks", "Number of ranks in the pipeline.", least=1, most=16, slider="d")
    microbatches = own_trait(8, "Micro-batches", "Micro-batches per step.", least=1, most=64, slider="d")
    virtual_stages = own_trait(
        2,
        "Stages per rank",
        "Number of stages on each rank; only interleaved schedules let you choose it.",
        least=1,
        most=4,
        slider="d",
    )
    t_f = own_trait(
        10.0,
        "Forward, ms",
        "Time of one micro-batch's forward pass through a rank's stages, in milliseconds.",
        **_TIME,
    )
    t_input = own_trait(
        10.0,
        "Backward for inputs, ms",
        "Time to compute the gradients of a rank's inputs for one micro-batch, in milliseconds.",
        **_TIME,
    )
    t_weight = own_trait(
        10.0,
        "Backward for weights, ms",
        "Time to compute the gradients of a rank's weights for one micro-batch, in milliseconds.",
        **_TIME,
    )
    send = own_trait(
        0.0,
        "Transfer to the next rank, ms",
        "Time from the end of an operation until its result arrives on another rank, in milliseconds.",
        **_TIME | {"reach": 10, "step": 0.1},
    )
    last_stage = own_trait(
        1.0,
        "Last stage, relative to others",
        "Time of the last stage, which has the output layer, as a multiple of the time of another stage.",
        least=0,
        reach=3,
        step=0.05,
        slider=".2f",
    )
    freed_by_input = own_trait(
        0.0,
        "Freed by the pass for inputs",
        "Fraction of the activations that the backward pass for inputs frees; the pass for weights frees the rest.",
        least=0,
        most=1,
        step=0.05,
        slider=".0%",
    )

    def __init__(self, **choices: Any) -> None:
        check_options("PipelineExplorer", choices, self.class_own_traits())
        super().__init__(**choices)
        self.timeline: Timeline | None = None
        self.controls = controls_for(self)
        self._idea, self._status, self._words, self._table = (widgets.HTML() for _ in range(4))
        self.figure = LiveFigure(go.Figure(), label="Operations of each rank")
        self.figure.add_class("ss-figure")
        all_schedules = heading("All schedules", NOTE)
        right = widgets.VBox([self.figure, self._words, all_schedules, self._table])
        frame = _Frame(
            title="Pipeline Explorer",
            about="the operations of each rank over time, its idle time, and the activations that it holds",
        )
        t.dlink((self, "schedule"), (frame, "subject"))
        frame.offer_copy(self, list(self.class_own_traits()))
        bar = classed(widgets.VBox([self._status]), "ss-stay")
        self.children = (frame, bar, columns(self._panel(), right))
        classed(self, "ss-lab", "ss-explorer")
        self.observe(lambda _: self.refresh(), list(self.class_own_traits()))
        self.refresh()

    def _kept(self) -> list[widgets.Widget | str]:
        return [self._status, self.figure, self._words, self._table]

    def _panel(self) -> widgets.VBox:
        """Return the controls stacked vertically, in groups with headings."""
        first, *groups = in_groups(PipelineExplorer, [("schedule",), *_GROUPS.values()])
        rows = [*(self.controls[name] for name in first), self._idea]
        for title, names in zip(_GROUPS, groups, strict=True):
            rows.append(widgets.HTML(f'<h3 class="ss-group">{title}</h3>'))
            rows += [self.controls[name] for name in names]
        return widgets.VBox(rows)

    @t.validate("schedule")
    def _known_schedule(self, proposal: Any) -> str:
        try:
            return str(PipelineSchedule(proposal["value"]).name)
        except SpecError as error:
            raise t.TraitError(str(error)) from None

    @property
    def held(self) -> int:
        """Stages per rank: the chosen number if the schedule allows a choice, otherwise the schedule's own number."""
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
        try:
            self.timeline = self._timeline()
        except ShardscopeError as error:
            self.timeline = None
            self._say(status_html(error, "failed"), "")
            self.figure.layout.display = "none"
        else:
            info = schedule_info(self.timeline, schedule=self.schedule, freed_by_input=self.freed_by_input)
            self._show(info, next(row.bubble for row in rows if row.name == self.schedule))
        self._table.value = comparison_html(rows, self.schedule)

    def _timeline(self) -> Timeline:
        table = build(self.schedule, self.stages, self.microbatches, self.held)
        times = {"F": self.t_f / self.held, "I": self.t_input / self.held, "W": self.t_weight / self.held}
        uneven = [1.0] * (table.num_stages - 1) + [self.last_stage] if self.last_stage != 1 else None
        return table.timeline(times, stage_cost=uneven, send=self.send)

    def _show(self, info: ScheduleInfo, formula: float) -> None:
        self.figure.figure = schedule_json(info)  # first, because the page draws it longest
        self.figure.layout.display = None
        self._say(status_html(self._against_formula(info, formula), "completed"), schedule_text(info))

    def _say(self, status: str, words: str) -> None:
        self._status.value = status
        self._words.value = words_html(words)

    def _against_formula(self, info: ScheduleInfo, formula: float) -> str:
        """Return text with the simulated step time and bubble, and the bubble from the closed-form formula.

        The formula assumes free communication and stages of equal cost.
        """
        counted = f"Step time {duration_text(info.gantt.end_ms / 1e3)}, bubble {info.gantt.bubble:.1%}"
        if type(PipelineSchedule(self.schedule)).bubble is PipelineSchedule.bubble:
            return f"{counted}."  # the schedule has no formula with which to compare the simulation
        if abs(formula - info.gantt.bubble) < 5e-4:
            return f"{counted}, as the closed-form formula predicts."
        why = (
            " for stages of equal cost without communication time"
            if self.send or self.last_stage != 1
            else ""
        )
        return f"{counted}; the closed-form formula gives a bubble of {formula:.1%}{why}."
