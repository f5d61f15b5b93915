"""The Planner's widgets and their layout; this module draws the data it receives and makes no decisions."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterable, Mapping
from importlib.resources import files
from typing import Any

import anywidget
import ipywidgets as widgets
import plotly.graph_objects as go
import traitlets as t

from shardscope.errors import SpecError
from shardscope.planner import PlanComparison, Plans, short
from shardscope.planner.table import KEY, advice, is_full, table_rows
from shardscope.spec.units import work_text
from shardscope_widgets.figures import _plan_answer, _plan_mesh, _plans, theme
from shardscope_widgets.kit.click_figure import ClickFigure
from shardscope_widgets.kit.copied import Copied
from shardscope_widgets.kit.frame import Frame
from shardscope_widgets.kit.live_figure import LiveFigure
from shardscope_widgets.kit.markup import classed, columns, heading, note_html, status_html, words_html
from shardscope_widgets.kit.script import script
from shardscope_widgets.planner._hold_fixed import FILTERS
from shardscope_widgets.planner._measured import MeasuredBox
from shardscope_widgets.planner._trained import TrainedPlan
from shardscope_widgets.words import AXIS_LABELS, safe

_EMPTY = _plans.PlansInfo((), (), 0.0)
ABOUT = "the parallel layouts of a model on a cluster, ranked by predicted time, free memory and cost"


TRAIN = (
    "Train a small model with this plan's axes of parallelism on at most 8 ranks of this machine, with computation and "
    "links slowed down in proportion to the plan"
)


class PlanTable(anywidget.AnyWidget):
    """A table of text in which one row is selected."""

    _esm = script(__package__, "table.js")
    _css = files(__package__).joinpath("planner.css").read_text(encoding="utf-8")
    header = t.List(t.Unicode()).tag(sync=True)
    rows = t.List(t.List(t.Unicode())).tag(sync=True)
    chosen = t.Int(1, help="Number of the selected row, from 1.").tag(sync=True)


class PlannerScreen:
    """All widgets of a planner, arranged around its controls."""

    def __init__(self, controls: Mapping[str, Mapping[str, widgets.Widget]], trained: TrainedPlan) -> None:
        (
            self.status,
            self.problem,
            self.numbers,
            self.advice,
            self.told,
            self.note,
            self.mesh_words,
            self.remarks,
        ) = (widgets.HTML() for _ in range(8))
        self._info, self._dots = _EMPTY, _plans.scatter(_EMPTY)
        empty = go.Figure()
        self.scatter = ClickFigure(empty, label="All plans")
        self.terms = LiveFigure(empty, label="Step time and memory of the chosen plan and of plan 1, by part")
        self.rejected = LiveFigure(empty, label="Layouts left out, by reason")
        self.mesh = LiveFigure(theme.blank(), label="Devices of the chosen plan, by group")
        self.frame = Frame(title="Planner", about=ABOUT)
        self.table, self.measured, self.flags = PlanTable(), MeasuredBox(), Copied()
        self.train = widgets.Button(icon="play", tooltip=TRAIN)
        self.train.add_class("ss-train")
        self.trained = trained
        self.pick = widgets.ToggleButtons(options=[], value=None)
        self.by = widgets.ToggleButtons(description="Colour by", options=[], value=None)
        self.unshipped = classed(widgets.Checkbox(indent=False), "ss-unshipped")
        self.children = self._arrange(controls)

    def _arrange(self, controls: Mapping[str, Mapping[str, widgets.Widget]]) -> tuple[widgets.Widget, ...]:
        where = [
            heading("Where each rank runs", "hover over a square for details"),
            self.by,
            self.mesh,
            self.mesh_words,
        ]
        train = (
            [] if sys.platform == "emscripten" else [self.train, self.trained.box]
        )  # pages cannot start ranks
        self.chosen = widgets.VBox([self.numbers, self.pick, self.advice])
        settings = classed(widgets.HBox([self.flags, self.remarks]), "ss-run-it")
        self.run = widgets.VBox(
            [
                *train,
                *where,
                heading("Settings of the chosen plan", "to copy into your launch script"),
                settings,
            ]
        )
        scroll = classed(widgets.VBox([self.table]), "ss-plan-scroll")
        self.answer = widgets.VBox(
            [
                heading("All plans", "click a plan to choose it"),
                self.scatter,
                scroll,
                widgets.HTML(note_html(f"{KEY}.")),
                heading("The chosen plan compared with plan 1"),
                self.terms,
                self.told,
                heading("Your measured step time", "of the chosen plan"),
                self.measured.box,
            ]
        )
        self.left_out = widgets.VBox([heading("Layouts left out of the table", "by reason"), self.rejected])
        right = widgets.VBox([self.problem, self.chosen, self.unshipped, self.run, self.note])
        bar = classed(widgets.VBox([self.status]), "ss-stay")
        return self.frame, bar, columns(_controls_box(controls), right), self.answer, self.left_out

    def say(self, text: str, *, state: str) -> None:
        """Set the status line at the top."""
        self.status.value = status_html(text, state)

    def draw_search(self, plans: Plans) -> None:
        """Draw the parts that change only with a new search: rejections and the calibration note."""
        self.trained.forget()
        self._info = _plans.plans_info(plans)
        self._dots = _plans.scatter(self._info)
        self.rejected.figure = _plans.rejected(plans.rejected)
        self.left_out.layout.display = None
        known = plans.setting.calibration
        why = "" if len(plans) else words_html(as_in_form(_plan_answer.reason(plans)))
        about = filter(None, as_in_form(known.note).rstrip(".").split("; "))
        told = " ".join([f"Calibration: {known.name}.", *(f"{each[0].upper()}{each[1:]}." for each in about)])
        self.note.value = why + note_html(told)

    def offer(self, plans: Plans, recommended: int) -> None:
        """Offer the recommended plan and the first plan, by their positions in the ranking."""
        is_fastest = len(plans) and plans.best.step_time_s == plans.step_time_s.min()
        first = "Fastest" if is_fastest else "First in the ranking"
        both = {recommended: f"Recommended: plan {recommended}", 1: f"{first}: plan 1"}
        if recommended == 1:
            both = {1: f"Recommended, {first.lower()}: plan 1"}
        self.pick.options = [(words, rank) for rank, words in both.items()]

    def draw_ranking(self, plans: Plans, chosen: int, *, tokens: float) -> None:
        """Draw the parts that depend on the ranking or the chosen plan: the answer, the table and the scatter plot.

        Args:
            plans: Result of the search.
            chosen: Position of the chosen plan in the ranking, from 1.
            tokens: Number of tokens to train on, for the time and the cost.
        """
        self._show(None)
        plan = plans.row(int(plans.order[chosen - 1]), rank=chosen)
        numbers = _plan_answer.numbers(plans, plan, tokens)
        is_tight = is_full(plan)
        step, _, mfu, memory, *_ = numbers
        told = f"Plan {chosen}: {step.value} per step, MFU {mfu.value}, {memory.value} {memory.about}."
        is_doubtful = is_tight or plans.needs_offload
        self.say(f"{_plan_answer.verdict(plans)} {told}", state="warning" if is_doubtful else "completed")
        self.numbers.value = _numbers_html(numbers, is_full=is_tight)
        failures = _plan_answer.failures(plans, plan)
        work = work_text(plans.global_batch, plans.asked.model.seq)
        text = f"Layout: {short(plan.layout)}.\nPer step: {work}.\n{advice(plans)} {failures}"
        self.advice.value = words_html(text)
        self.pick.value = chosen if chosen in {rank for _, rank in self.pick.options} else None
        header, rows = table_rows(plans, tokens=tokens)
        with self.table.hold_sync():
            self.table.header = ["framework" if name == "software" else name for name in header]
            self.table.rows, self.table.chosen = rows, chosen
        best, kept = (int(plans.order[rank - 1]) for rank in (1, chosen))
        rings = _plans.rings(self._info, best=best, chosen=kept)
        self.scatter.figure = self._dots | {"data": [*self._dots["data"], *rings]}

    def draw_chosen(self, plans: Plans, chosen: int, explanation: PlanComparison | None) -> None:
        """Compare the plan at position `chosen` of the ranking, from 1, with the first plan."""
        self.trained.show(plans.layout(int(plans.order[chosen - 1])))
        self.terms.figure = _plans.terms(_plans.terms_info(plans, (1, chosen)))
        self.told.value = _told(explanation)
        self._draw_config(plans, chosen)

    def draw_mesh(self, info: _plan_mesh.PlanMeshInfo) -> None:
        """Draw the devices of the chosen plan, and offer the axes by which they can be coloured."""
        axes = tuple(each.axis for each in info.groups)
        if axes != self.by.options:
            self.by.options = axes
        self.by.value = info.by or None
        self.mesh.figure = _plan_mesh.mesh(info)
        self.mesh_words.value = note_html(f"{_plan_mesh.mesh_key(info)} {_plan_mesh.plan_mesh_text(info)}")

    def _draw_config(self, plans: Plans, chosen: int) -> None:
        """Show the settings of the chosen plan's framework, or why there are none."""
        try:
            config = plans.trainer_config(chosen)
        except SpecError as error:
            self.flags.layout.display = "none"
            self.remarks.value = words_html(f"No settings to copy: {as_in_form(str(error))}.")
            return
        self.flags.layout.display = None
        self.flags.title, self.flags.text = config.trainer, config.command
        told = "".join(note_html(as_in_form(remark)) for remark in config.remarks)
        title = "Before you run it: what to add, and what differs from the plan"
        self.remarks.value = f"<details open><summary>{title}</summary>{told}</details>"

    def draw_nothing(self) -> None:
        """Hide all results except the numbers of rejected layouts, because no layout fits."""
        self._show("none")
        self.table.rows = []
        self.scatter.figure, self.told.value = self._dots, ""

    def _show(self, display: str | None) -> None:
        for part in (self.chosen, self.run, self.answer):
            part.layout.display = display

    def draw_failed(self) -> None:
        """Clear all results after a search that failed."""
        self._info, self._dots = _EMPTY, _plans.scatter(_EMPTY)
        self.left_out.layout.display = "none"
        self.note.value = ""
        self.draw_nothing()


def _numbers_html(numbers: Iterable[_plan_answer.PlanNumber], *, is_full: bool) -> str:
    """Return the numbers of a plan as large text, with its memory in the warning colour if `is_full`."""
    parts = [
        f"<div{' class=ss-full' * (is_full and 'memory' in each.name)}><span>{safe(each.name)}</span> "
        f"<b>{safe(each.value)}</b> <span>{safe(each.about)}</span></div>"
        for each in numbers
    ]
    return f'<div class="ss-numbers">{"".join(parts)}</div>'


def _told(explanation: PlanComparison | None) -> str:
    if explanation is None:
        return words_html("Choose a row or a point to see how that plan differs from plan 1.")
    head, *rest = map(safe, explanation.sentences)
    return f'<div class="ss-told"><b>{head}</b><ul>{"".join(f"<li>{line}</li>" for line in rest)}</ul></div>'


_IN_FORM: dict[str, str | Callable[[re.Match[str]], str]] = {
    r"plan with fix=\{'recompute_layers': 0\}": "hold Recompute fixed at full",
    r"plan with fix=\{'(\w+)': '?([\w-]+)'?\}": lambda found: f"hold {_label(found[1])} fixed at {found[2]}",
    r"software='([^']*)' (is assumed [^;]*); give software=\.\.\. for another": (
        r"the framework \1 \2; choose another under Framework"
    ),
    r"(supports, )plan with software='[^']*' and leave these axes out of fix": (
        r"\1untick the box above and do not hold these axes fixed"
    ),
    r"leave (zero|these axes) out of fix": r"do not hold \1 fixed",
    r"plan with software='([^']*)'": r"choose \1 under Framework",
    r", or software='([^']*)'": r", or choose \1 under Framework",
    r"software='([^']*)'": r"framework \1",
}
"""Replacements for arguments of `ss.plan` in the toolkit's sentences, by regular expression, in the order applied."""


def _label(axis: str) -> str:
    return AXIS_LABELS.get(axis, axis.capitalize())


def as_in_form(text: str) -> str:
    """Return a sentence with the form's words instead of the arguments of `ss.plan`."""
    for pattern, words in _IN_FORM.items():
        text = re.sub(pattern, words, text)
    return re.sub(
        rf"\b({'|'.join(FILTERS)})='?([\w-]+)'?", lambda found: f"{_label(found[1])} {found[2]}", text
    )


def _controls_box(controls: Mapping[str, Mapping[str, Any]]) -> widgets.VBox:
    boxes: list[widgets.Widget] = []
    for title, group in controls.items():
        sliders = title == "Weights"
        box = widgets.VBox(list(group.values())) if sliders else widgets.GridBox(list(group.values()))
        box.add_class("ss-weights" if sliders else "ss-controls")
        boxes += [heading(title), box]
    return widgets.VBox(boxes)
