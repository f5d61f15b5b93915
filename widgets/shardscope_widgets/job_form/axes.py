"""The number of ranks along each axis of a mesh: a row of controls, which is empty while the strategy has one axis."""

from __future__ import annotations

import ipywidgets as widgets
from traitlets import TraitError

from shardscope.errors import ShardscopeError
from shardscope_widgets.job_form.choices import JobChoices
from shardscope_widgets.job_form.options import Options
from shardscope_widgets.kit.controls import show
from shardscope_widgets.kit.form import setting_in
from shardscope_widgets.kit.markup import classed, note_html
from shardscope_widgets.words import AXIS_LABELS

_ABOUT = {
    "data": "Replicas of the model, each with its share of the batch",
    "tensor": "Ranks over which each layer is divided",
    "pipeline": "Ranks that hold successive layers, through which micro-batches pass",
    "context": "Ranks that each hold a part of every sequence",
    "expert": "Ranks over which the experts are distributed",
}


class Axes(widgets.HBox):  # type: ignore[misc]
    """A control for each axis of the chosen strategy, and one for the strategy along the data axis.

    Changing the number of ranks along one axis leaves the other axes as they are, and changes the number of ranks.

    Args:
        choices: The traits.
        options: The settings of the strategy, which have the control for the strategy along the data axis.
    """

    def __init__(self, choices: JobChoices, options: Options) -> None:
        self._choices, self._options = choices, options
        self.controls: dict[str, widgets.BoundedIntText] = {}
        self._refusal = widgets.HTML()
        super().__init__()
        classed(self, "ss-axes", "ss-controls")
        choices.observe(lambda _change: self._show(), ["strategy", "strategy_options", "world_size", "model"])
        self._show()

    def _show(self, refused: str = "") -> None:
        shown: list[widgets.DOMWidget] = []
        for axis, ranks in self._choices.degrees.items():
            control = self.controls.get(axis) or self._control(axis)
            show(control, ranks)
            shown.append(control)
        shown += [self._options.controls[name] for name in self._options.in_axes()]
        self._refusal.value = note_html(refused, is_bad=True) if refused else ""
        self.children = (*shown, *([self._refusal] if refused else []))
        self.layout.display = None if shown else "none"

    def _control(self, axis: str) -> widgets.BoundedIntText:
        most = setting_in(JobChoices, "world_size").most
        control = widgets.BoundedIntText(
            description=AXIS_LABELS.get(axis, axis.capitalize()),
            min=1,
            max=int(most or 1),
            tooltip=_ABOUT.get(axis, ""),
        )
        control.observe(lambda _change: self._take(axis), "value")
        self.controls[axis] = control
        return control

    def _take(self, axis: str) -> None:
        if self._choices.degrees.get(axis) == self.controls[axis].value:
            return
        try:
            self._choices.set_degree(axis, self.controls[axis].value)
        except (ShardscopeError, TraitError) as error:
            self._show(refused=str(error))
