"""The controls: one per trait of `CommunicationInputs`, synchronised with it in both directions."""

from __future__ import annotations

from math import log10

import ipywidgets as widgets

from shardscope.analytic.communication import ALGORITHMS
from shardscope.errors import SpecError
from shardscope.spec.units import parse
from shardscope_widgets.communication_calculator._asked import CommunicationInputs
from shardscope_widgets.figures._communication import LARGEST, SMALLEST
from shardscope_widgets.figures._communication_look import LOOKS
from shardscope_widgets.kit.controls import controls_for
from shardscope_widgets.kit.form import names_in, setting_in
from shardscope_widgets.kit.markup import classed, heading
from shardscope_widgets.kit.swatch import swatch
from shardscope_widgets.words import bytes_text

_STEP = 1 / 24
"""Distance of two places of the slider, in powers of ten."""
FIRST = ("op", "workers", "bandwidth", "bandwidth_unit", "latency_us")
STEP = ("compute_ms", "overlap", "memory_bandwidth")


def make_controls(asked: CommunicationInputs) -> dict[str, widgets.DOMWidget]:
    """Return all controls by the name of their trait, in tab order."""
    names = names_in(type(asked))
    controls = controls_for(asked, [name for name in names if name != "num_bytes"])
    size = widgets.FloatLogSlider(base=10, min=3, max=11, readout=False, step=_STEP)
    return {name: controls.get(name, size) for name in names}


class Sliding(widgets.VBox):  # type: ignore[misc]
    """The message-size slider, and a text box above it in which the size can also be typed."""

    def __init__(self, asked: CommunicationInputs, slider: widgets.DOMWidget) -> None:
        self.size = widgets.Text(description="Message", continuous_update=False)
        self._value = widgets.HTML()  # for screen readers, which read it out with the slider
        super().__init__([self.size, self._value, slider])
        self._asked, self._slider = asked, slider
        both = f"{bytes_text(SMALLEST)} to {bytes_text(LARGEST)}"
        slider.tooltip = f"Size of the message, {both}"
        self.size.tooltip = f"Size of the message with its unit, such as 25 MB, {both}"
        self.add_class("ss-sliding")
        asked.observe(lambda _change: self._say(), "num_bytes")
        self.size.observe(lambda _change: self._take(), "value")
        slider.observe(lambda _change: self._slide(), "value")
        self._say()

    def _say(self) -> None:
        self._slider.value = self._asked.num_bytes
        self.size.value = bytes_text(self._asked.num_bytes)
        label = '<span class="ss-about">Message</span>'
        self._value.value = f'{label}<span class="ss-value">{self.size.value}</span>'

    def _slide(self) -> None:
        """Set the size to the slider's, unless the slider has only moved to its place nearest to the size."""
        if abs(log10(self._slider.value / self._asked.num_bytes)) > _STEP / 2:
            self._asked.num_bytes = self._slider.value

    def _take(self) -> None:
        """Set the size to what was typed; a text that is not a size in range is undone."""
        if self.size.value == bytes_text(self._asked.num_bytes):
            return
        try:
            size = parse(self.size.value, "bytes", field="message")
        except SpecError:
            size = 0.0
        if SMALLEST <= size <= LARGEST:
            self._asked.num_bytes = size
        self._say()


class Ways(widgets.VBox):  # type: ignore[misc]
    """A checkbox for each algorithm that implements the operation, with a sample of its line."""

    def __init__(self, asked: CommunicationInputs) -> None:
        self._asked = asked
        self._quiet = False
        self.boxes = {
            name: widgets.Checkbox(description=algorithm.title, indent=False, tooltip=algorithm.about)
            for name, algorithm in ALGORITHMS.items()
        }
        self._rows = {name: self._row(name, box) for name, box in self.boxes.items()}
        super().__init__()
        self.add_class("ss-ways")
        for name, box in self.boxes.items():
            box.observe(lambda change, name=name: self._tick(name, is_on=change["new"]), "value")
        asked.observe(lambda _change: self._show(), ["op", "algorithms"])
        self._show()

    def _row(self, name: str, box: widgets.DOMWidget) -> widgets.DOMWidget:
        return classed(widgets.HBox([widgets.HTML(swatch(LOOKS[name])), box]), "ss-way")

    def _show(self) -> None:
        self._quiet = True
        for name, box in self.boxes.items():
            box.value = name in self._asked.algorithms
        self._quiet = False
        self.children = tuple(self._rows[name] for name in self._asked.able)

    def _tick(self, name: str, *, is_on: bool) -> None:
        if not self._quiet:
            others = [other for other in self._asked.algorithms if other != name]
            self._asked.algorithms = [*others, name] if is_on else others


def panel(asked: CommunicationInputs, controls: dict[str, widgets.DOMWidget], ways: Ways) -> widgets.VBox:
    """Lay out the common inputs, the algorithms, inputs of particular algorithms, and inputs for the efficiency."""
    what = widgets.GridBox([*(controls[name] for name in FIRST), Sliding(asked, controls["num_bytes"])])
    some = widgets.GridBox([])
    last = widgets.GridBox([controls[name] for name in STEP])
    for box in (what, some, last):
        box.add_class("ss-controls")

    def show(_change: object = None) -> None:
        question = asked.question
        used = {name for each in question.algorithms for name in question.options.get(each, {})}
        some.children = tuple(control for name, control in controls.items() if name in used)
        some.layout.display = None if some.children else "none"

    def name_units(_change: object = None) -> None:
        for name in ("bandwidth", "inner_bandwidth"):
            controls[name].description = f"{setting_in(type(asked), name).label}, {asked.bandwidth_unit}"

    asked.observe(show, ["op", "algorithms"])
    asked.observe(name_units, "bandwidth_unit")
    show()
    name_units()
    scaling = heading("Training step", "for the tabs Efficiency and Compression")
    return widgets.VBox([what, heading("Compare"), ways, some, scaling, last])
