"""The controls of the Training Lab: one per choice, synchronised with the trait of the same name."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import anywidget
import ipywidgets as widgets
import traitlets as t

from shardscope_widgets.job_form.choices import AS_IT_IS, NO_LATENCY, JobChoices
from shardscope_widgets.job_form.families import compressor_families, strategy_families
from shardscope_widgets.job_form.topics import OPTIONS, all_names, topic_text, topics
from shardscope_widgets.kit.controls import controls_for, field
from shardscope_widgets.kit.form import setting_in
from shardscope_widgets.kit.markup import classed
from shardscope_widgets.kit.script import script

_FAMILIES = {"strategy": strategy_families, "compression": compressor_families}


class Picker(anywidget.AnyWidget):
    """A select box with grouped entries, which ipywidgets lacks; `value` is the selected entry."""

    _esm = script(__package__, "picker.js")
    description = t.Unicode("").tag(sync=True)
    tooltip = t.Unicode("").tag(sync=True)
    value = t.Unicode("").tag(sync=True)
    groups: t.List[list[object]] = t.List(help="(group name, entries) pairs.").tag(sync=True)


def make_controls(choices: JobChoices, names: Sequence[str] = ()) -> dict[str, widgets.DOMWidget]:
    """Return controls bound to `choices`, by trait name.

    Args:
        choices: The traits.
        names: Traits that get a control, in this order; by default all traits.
    """
    names = names or [name for name in all_names() if name not in OPTIONS]
    pickers = {
        name: Picker(description=setting_in(JobChoices, name).label, groups=families())
        for name, families in _FAMILIES.items()
        if name in names
    }
    return controls_for(choices, names, **pickers)


class Topics(widgets.Accordion):  # type: ignore[misc]
    """The controls that are not always in view, folded by topic; a topic's title names the values that were changed.

    Args:
        choices: The traits.
        controls: Controls by trait name.
        options: Boxes with the settings of the selected method, by the trait that selects the method.
        first: Box above the topics, with controls that do not describe the job.
        first_title: Function that returns the title of that box; `name` calls it.
    """

    def __init__(
        self,
        choices: JobChoices,
        controls: Mapping[str, widgets.DOMWidget],
        options: Mapping[str, widgets.DOMWidget],
        first: widgets.VBox,
        first_title: Callable[[], str],
    ) -> None:
        self._choices, self._topics, self._first_title = choices, topics(), first_title
        boxes = [_topic_box(names, controls, options) for names in self._topics.values()]
        super().__init__([first, *boxes], selected_index=None)
        self.add_class("ss-topics")
        shown_with_a_link(boxes, controls)
        choices.observe(self.name, [name for names in self._topics.values() for name in names])
        self.name()

    def name(self, _change: object = None) -> None:
        """Write the titles of all topics."""
        own = (topic_text(*topic, self._choices) for topic in self._topics.items())
        self.titles = (self._first_title(), *own)


def _topic_box(
    names: Sequence[str],
    controls: Mapping[str, widgets.DOMWidget],
    options: Mapping[str, widgets.DOMWidget],
) -> widgets.VBox:
    boxes = [options[OPTIONS[name]] if name in OPTIONS else field(controls[name]) for name in names]
    return classed(widgets.VBox(boxes), "ss-controls")


def shown_with_a_link(boxes: Sequence[widgets.VBox], controls: Mapping[str, widgets.DOMWidget]) -> None:
    """Show the latency only if a bandwidth is chosen, or if a latency set without a bandwidth must be reset."""
    bandwidth, latency = controls["bandwidth"], controls["latency"]
    box = next(each for group in boxes for each in group.children if latency in getattr(each, "children", ()))

    def show(_change: object = None) -> None:
        needless = bandwidth.value == AS_IT_IS and latency.value == NO_LATENCY
        box.layout.display = "none" if needless else None

    bandwidth.observe(show, "value")
    latency.observe(show, "value")
    show()
