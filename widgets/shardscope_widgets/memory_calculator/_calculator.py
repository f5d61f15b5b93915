"""The Memory Calculator widget: choices on the left; verdict, bars and table on the right."""

from __future__ import annotations

from importlib.resources import files
from typing import Any

import ipywidgets as widgets
import plotly.graph_objects as go
import traitlets as t

from shardscope.analytic.memory import memory_term, stage_memory, tensor_room
from shardscope.analytic.terms import Term
from shardscope.errors import ShardscopeError
from shardscope.show import Cell, Table
from shardscope.spec.layout import Layout, short
from shardscope.spec.model import Transformer
from shardscope.spec.units import gib_text, work_text
from shardscope_widgets.figures import theme
from shardscope_widgets.figures._memory_plan import (
    KIND_NAMES,
    Block,
    MemoryPlanInfo,
    figure_dict,
    memory_plan_info,
    memory_plan_text,
    symbols_text,
    table_rows,
)
from shardscope_widgets.kit.form import check_options
from shardscope_widgets.kit.frame import LAB_CSS, Frame
from shardscope_widgets.kit.guard import problem_html
from shardscope_widgets.kit.live_figure import LiveFigure
from shardscope_widgets.kit.markup import (
    classed,
    columns,
    note_html,
    status_html,
    words_html,
)
from shardscope_widgets.kit.still import Still
from shardscope_widgets.kit.swatch import chip
from shardscope_widgets.memory_calculator import _controls
from shardscope_widgets.memory_calculator._catalogue import find_device
from shardscope_widgets.memory_calculator._choices import LAYOUT_FIELDS, MemoryChoices
from shardscope_widgets.memory_calculator._verdict import Verdict, verdict
from shardscope_widgets.words import safe

ABOUT = "predicted memory of each device; hover over a block for its formula, inputs and source"


_SIZES = {"model", "data", "tensor", "pipeline", "context", "expert"}
"""Choices that replace the initial layout: if any is given, degrees of parallelism that are not given are 1."""


class _Frame(Frame):
    _css = LAB_CSS + files(__package__).joinpath("memory.css").read_text(encoding="utf-8")


class MemoryCalculator(Still, widgets.VBox, MemoryChoices):  # type: ignore[misc]
    """Choose a model, a device and a layout, and see the memory of each pipeline stage.

    Without arguments, the calculator shows GPT-3 on 1,024 devices. If a model or a degree of parallelism is given, all
    degrees that are not given are 1.

    Args:
        choices: Initial values of `MemoryChoices` traits, for example
            ``model="llama-3-70b", data=8, tensor=8, zero=3``.

    Example:
        >>> calculator = MemoryCalculator(model="gpt3-175b", data=256, zero=3)
        >>> calculator.verdict.fits
        False
    """

    problem = t.Unicode("", help="Why the layout is invalid, as text; empty if it is valid.")

    def __init__(self, **choices: Any) -> None:
        MemoryChoices.__init__(self)
        super().__init__()
        check_options("MemoryCalculator", choices, MemoryChoices.class_own_traits())
        alone = dict.fromkeys(("data", "tensor", "pipeline"), 1) if _SIZES & {*choices} else {}
        for name, value in (alone | choices).items():
            setattr(self, name, value)
        self._is_refitting = False
        self._model: Transformer = self.chosen_model()
        self.term: Term | None = None
        self.info: MemoryPlanInfo | None = None
        self.verdict = Verdict(True, "")
        self.controls = _controls.make_controls(self)
        self.figure = LiveFigure(go.Figure(), label="Memory of each pipeline stage")
        self._status, self._problem, self._size, self._words, self._table = (widgets.HTML() for _ in range(5))
        self.children = self._arrange()
        classed(self, "ss-lab", "ss-memory")
        self.observe(self._take_model, ["model", "seq"])
        self.observe(self._update, [*LAYOUT_FIELDS, "device", "framework"])
        self._take_model()

    def _arrange(self) -> tuple[widgets.Widget, ...]:
        bar = classed(widgets.VBox([self._status]), "ss-stay")
        right = widgets.VBox([self._problem, self._size, self.figure, self._words, self._table])
        left = _controls.panel(self.controls)
        frame = _Frame(title="Memory Calculator", about=ABOUT)
        t.dlink((self, "model"), (frame, "subject"), lambda model: str(getattr(model, "name", model)))
        frame.offer_copy(self, [*MemoryChoices.class_own_traits()], together=_SIZES)
        return frame, bar, columns(left, right)

    def _kept(self) -> list[widgets.Widget | str]:
        return [self._status, self._problem, self._size, self.figure, self._words, self._table]

    def __repr__(self) -> str:
        return f"MemoryCalculator({self._model.name}: {self.verdict.sentence or self.problem})"

    def _take_model(self, _change: object = None) -> None:
        """Switch to another model, and let the sliders offer divisors of its numbers of heads, layers and experts."""
        try:
            self._model = self.chosen_model()
        except (ShardscopeError, OSError) as error:
            self._say_problem(str(error))
            return
        self._is_refitting = True
        try:
            _controls.refit(self, self.controls, self._model)
        finally:
            self._is_refitting = False
        self._update()

    def _update(self, _change: object = None) -> None:
        """Recompute and redraw everything, or show why the layout is infeasible."""
        if self._is_refitting:
            return
        self.controls["recompute_layers"].disabled = self.recompute != "full"
        try:
            layout, framework = self._compute()
        except ShardscopeError as error:
            self._say_problem(str(error))
            return
        self.problem = self._problem.value = ""
        self._draw(layout, framework)

    def _compute(self) -> tuple[Layout, str]:
        """Predict the memory of the chosen layout, and return the layout and its framework."""
        layout, device = self.chosen_layout(), find_device(self.device)
        framework = self._framework_of(layout)
        self.term = memory_term(self._model, layout, device, framework=framework)
        room = tensor_room(device, framework)
        self.info = memory_plan_info(self.term, capacity_bytes=room, device=device.name)
        self.verdict = verdict(self._model, layout, self.info, device, framework=framework)
        return layout, framework

    def _say_problem(self, sentence: str) -> None:
        """Show `sentence` as the problem, and clear the results of the previous layout."""
        self.problem, self.verdict = sentence, Verdict(False, "")
        self.term = self.info = None
        self.figure.layout.display = "none"
        self._size.value = self._words.value = self._table.value = ""
        self._problem.value = problem_html(safe(sentence))
        self._status.value = status_html("This layout is invalid.", "failed")

    def _draw(self, layout: Layout, framework: str) -> None:
        assert self.info is not None
        state = "completed" if self.verdict.fits else "failed"
        where = f"{self._model.name} on {layout.num_devices:,} x {self.device}"
        work = f"{work_text(layout.global_batch, self._model.seq)}, {framework}: {short(layout)}."
        size = f"{self._model.num_params / 1e9:.4g} billion parameters."
        self.figure.figure = figure_dict(self.info)  # first, because a figure takes longest to draw
        self._status.value = status_html(self.verdict.sentence, state)
        self._size.value = note_html(f"{where}, {work} {size} {self._host_text(layout, framework)}")
        self.figure.layout.display = None
        self._words.value = words_html(memory_plan_text(self.info))
        self._table.value = _table_html(self.info)

    def _host_text(self, layout: Layout, framework: str) -> str:
        if self.offload == "none":
            return ""
        away = stage_memory(
            self._model,
            layout,
            framework=framework,
            device=find_device(self.device),
        ).host.max()
        return f"Host memory per device: {gib_text(float(away))}."


def _table_html(info: MemoryPlanInfo) -> str:
    """Return the blocks of the stage with the most memory as an HTML table, which screen readers can read."""
    key = symbols_text(info)
    caption = f"{info.stages[info.fullest].name.capitalize()}, block by block"
    table = Table(("block", "type", "size", "formula, in bytes"), [*map(_row, table_rows(info))], caption)
    return table.html("ss-table") + (note_html(f"{key}.") if key else "")


def _row(block: Block) -> list[str | Cell]:
    kind = Cell(KIND_NAMES.get(block.kind, block.kind), mark=chip(theme.MEMORY_LOOKS[block.kind]))
    return [block.name, kind, gib_text(block.num_bytes), block.formula]
