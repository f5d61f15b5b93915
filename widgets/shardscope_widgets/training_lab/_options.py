"""The settings of the chosen strategy, or compression, as controls made from its spec; they change with the choice."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import ipywidgets as widgets
from traitlets import TraitError

from shardscope_widgets.training_lab._choices import KINDS, Choices
from shardscope_widgets.training_lab._families import Setting, applies, settings_of, settings_of_method
from shardscope_widgets.words import safe

MOST = 2**53 - 1
"""Of what can be typed: the largest whole number that a page holds exactly. What is too much is for the spec to say."""


class Topic(NamedTuple):
    """Whose settings they are: the trait that names it, the trait that holds what differs from its defaults, and how
    to read and set them.
    """

    chooser: str
    trait: str
    settings: Callable[[str], list[Setting]]
    values: Callable[[Choices], dict[str, Any]]
    put: Callable[[Choices, str, Any], None]
    applies: Callable[[str, str, dict[str, Any]], bool]


STRATEGY = Topic(
    "strategy", "options", settings_of, lambda choices: choices.all_options, Choices.set_option, applies
)


def topic_of(field: str) -> Topic:
    """The settings of the chosen method of a kind."""
    return Topic(
        field, f"{field}_options", lambda name: settings_of_method(KINDS[field], name),
        lambda choices: choices.method(field).settings,
        lambda choices, setting, value: choices.set_method_option(field, setting, value),
        lambda *_: True,
    )  # fmt: skip


class Options(widgets.GridBox):  # type: ignore[misc]
    """Bound both ways to the traits of `choices` that `topic` names. Controls are made once and kept.

    A value that the choices refuse is taken back, and `refusal` says why until the next one is taken.
    """

    def __init__(self, choices: Choices, topic: Topic) -> None:
        self._choices, self._topic = choices, topic
        self._made: dict[str, dict[str, widgets.DOMWidget]] = {}
        self.refusal = widgets.HTML()
        self.refusal.add_class("ss-refusal")
        super().__init__()
        self.add_class("ss-controls")
        self.add_class("ss-options")
        choices.observe(lambda _change: self._show(), [topic.chooser, topic.trait])
        self._show()

    @property
    def _kind(self) -> str:
        return str(getattr(self._choices, self._topic.chooser))

    @property
    def controls(self) -> dict[str, widgets.DOMWidget]:
        """The controls of what is chosen, by field."""
        kind = self._kind
        if kind not in self._made:
            settings = self._topic.settings(kind)
            self._made[kind] = {setting.field: self._control(kind, setting) for setting in settings}
        return self._made[kind]

    def _show(self, refused: str = "") -> None:
        kind, chosen = self._kind, self._topic.values(self._choices)
        shown = []
        for setting in self._topic.settings(kind):
            control = self.controls[setting.field]
            control.value = _to_control(setting, chosen[setting.field])
            if self._topic.applies(kind, setting.field, chosen):
                shown.append(control)
        self.refusal.value = f'<div class="ss-note bad" role="alert">{safe(refused)}</div>' if refused else ""
        self.children = (*shown, *([self.refusal] if refused else []))
        self.layout.display = None if shown else "none"

    def _control(self, kind: str, setting: Setting) -> widgets.DOMWidget:
        control = _make(setting)
        control.tooltip = f"0 leaves it to the default. {setting.help}" if setting.optional else setting.help

        def changed(change: dict[str, Any]) -> None:
            if self._kind == kind:
                self._put(setting, change["new"])

        control.observe(changed, "value")
        return control

    def _put(self, setting: Setting, value: Any) -> None:
        try:
            self._topic.put(self._choices, setting.field, _from_control(setting, value))
        except TraitError as error:
            self._show(refused=str(error))


def _make(setting: Setting) -> widgets.DOMWidget:
    value = _to_control(setting, setting.default)
    if setting.kind == "choice":
        return widgets.Dropdown(description=setting.label, options=list(setting.values), value=value)
    if setting.kind == "switch":
        return widgets.Checkbox(description=setting.label, value=value, indent=False)
    if setting.kind == "number":
        return widgets.BoundedFloatText(description=setting.label, min=0, max=MOST, step=0.001, value=value)
    return widgets.BoundedIntText(description=setting.label, min=0, max=MOST, value=value)


def _to_control(setting: Setting, value: Any) -> Any:
    return 0 if setting.kind == "count" and value is None else value


def _from_control(setting: Setting, value: Any) -> Any:
    return None if setting.optional and value == 0 else value
