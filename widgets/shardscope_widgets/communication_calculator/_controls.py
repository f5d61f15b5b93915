"""The controls: one per trait of `Asked`, bound both ways."""

from __future__ import annotations

from typing import Any

import ipywidgets as widgets

from shardscope.analytic.communication import ALGORITHMS, OPS
from shardscope_widgets.communication_calculator._asked import UNITS, Asked
from shardscope_widgets.figures._communication import LARGEST, SMALLEST
from shardscope_widgets.figures._communication_look import LOOKS
from shardscope_widgets.kit.form import link
from shardscope_widgets.kit.swatch import swatch
from shardscope_widgets.words import bytes_text

NEEDED_BY = {
    "per_node": {"hierarchical"},
    "inner_bandwidth": {"hierarchical"},
    "servers": {"parameter-server", "byteps"},
    "dedicated": {"parameter-server"},
    "wavelengths": {"optical-ring"},
}
"""Algorithms that use each setting; settings that are not listed apply to all algorithms."""


def _count(text: str, most: int = 65_536) -> widgets.DOMWidget:
    return widgets.BoundedIntText(description=text, min=1, max=most)


def _number(text: str, least: float, step: float) -> widgets.DOMWidget:
    return widgets.BoundedFloatText(description=text, min=least, max=1e9, step=step)


def _slider(text: str, low: float, high: float, **more: Any) -> widgets.DOMWidget:
    return widgets.FloatLogSlider(description=text, base=10, min=low, max=high, readout=False, **more)


def make_controls(asked: Asked) -> dict[str, widgets.DOMWidget]:
    """All controls by the name of their trait, in tab order."""
    controls: dict[str, widgets.DOMWidget] = {
        "op": widgets.Dropdown(description="Operation", options=[(op.replace("_", "-"), op) for op in OPS]),
        "workers": _count("Workers"),
        "bandwidth": _number("Bandwidth, one way", 1e-6, 1),
        "bandwidth_unit": widgets.Dropdown(description="Unit", options=list(UNITS)),
        "latency_us": _number("Latency, µs", 0, 1),
        "num_bytes": _slider("Message", 3, 11, step=1 / 24),
        "per_node": _count("Workers a node", 4096),
        "inner_bandwidth": _number("Bandwidth inside", 1e-6, 1),
        "servers": _count("Servers"),
        "dedicated": widgets.Checkbox(description="Servers apart", indent=False),
        "wavelengths": _count("Wavelengths", 1024),
        "compute_ms": _number("Computing, ms", 1e-6, 10),
        "overlap": widgets.FloatSlider(description="Overlap", min=0, max=1, step=0.05, readout_format=".0%"),
    }
    link(asked, controls)
    return controls


class Sliding(widgets.VBox):  # type: ignore[misc]
    """The message-size slider with its value as text above it."""

    def __init__(self, asked: Asked, slider: widgets.DOMWidget) -> None:
        self._value = widgets.HTML()
        super().__init__([self._value, slider])
        slider.description, self._slider = "", slider
        slider.tooltip = f"Size of the message, {bytes_text(SMALLEST)} to {bytes_text(LARGEST)}"
        self.add_class("ss-sliding")
        asked.observe(lambda change: self._say(change["new"]), "num_bytes")
        self._say(asked.num_bytes)

    def _say(self, num_bytes: float) -> None:
        label = '<span class="ss-about">Message</span>'
        self._value.value = f'{label}<span class="ss-value">{bytes_text(num_bytes)}</span>'


class Ways(widgets.VBox):  # type: ignore[misc]
    """A checkbox for each algorithm that implements the operation, with a sample of its line."""

    def __init__(self, asked: Asked) -> None:
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
        row = widgets.HBox([widgets.HTML(swatch(LOOKS[name])), box])
        row.add_class("ss-way")
        return row

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


def panel(asked: Asked, controls: dict[str, widgets.DOMWidget], ways: Ways) -> widgets.VBox:
    """Lay out the panel: common inputs, algorithm checkboxes, inputs of some algorithms, inputs of the efficiency."""
    first = ["op", "workers", "bandwidth", "bandwidth_unit", "latency_us"]
    what = widgets.GridBox([*(controls[name] for name in first), Sliding(asked, controls["num_bytes"])])
    some = widgets.GridBox([])
    last = widgets.GridBox([controls["compute_ms"], controls["overlap"]])
    for box in (what, some, last):
        box.add_class("ss-controls")

    def show(_change: object = None) -> None:
        chosen = set(asked.question.algorithms)
        some.children = tuple(controls[name] for name, users in NEEDED_BY.items() if users & chosen)
        some.layout.display = None if some.children else "none"

    asked.observe(show, ["op", "algorithms"])
    show()
    compare = widgets.HTML('<div class="ss-heading">Compare</div>')
    scaling = widgets.HTML('<div class="ss-heading">A step <span>for the efficiency</span></div>')
    return widgets.VBox([what, compare, ways, some, scaling, last])
