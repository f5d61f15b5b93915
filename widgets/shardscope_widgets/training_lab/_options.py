"""The settings of the chosen method of a kind as controls made from its spec; they change with the choice."""

from __future__ import annotations

from typing import Any

import ipywidgets as widgets
from traitlets import TraitError

from shardscope_widgets.training_lab._choices import KINDS, Choices
from shardscope_widgets.training_lab._families import Setting, applies, settings_of_method
from shardscope_widgets.words import safe

MOST = 2**53 - 1
"""Of what can be typed: the largest whole number that a page holds exactly. What is too much is for the spec to say."""


class Options(widgets.GridBox):  # type: ignore[misc]
    """Bound both ways to the traits of `choices` for a kind of methods. Controls are made once and kept.

    A value that the choices refuse is taken back, and `refusal` says why until the next one is taken.
    """

    def __init__(self, choices: Choices, field: str) -> None:
        self._choices, self._field = choices, field
        self._made: dict[tuple[str, str], dict[str, widgets.DOMWidget]] = {}
        self.refusal = widgets.HTML()
        self.refusal.add_class("ss-refusal")
        super().__init__()
        self.add_class("ss-controls")
        self.add_class("ss-options")
        choices.observe(lambda _change: self._show(), [field, f"{field}_options"])
        self._show()

    @property
    def _name(self) -> str:
        return str(getattr(self._choices, self._field))

    @property
    def _settings(self) -> list[Setting]:
        return settings_of_method(KINDS[self._field], self._name)

    @property
    def controls(self) -> dict[str, widgets.DOMWidget]:
        """The controls of what is chosen, by field."""
        name, settings = self._name, self._settings
        key = name, repr(settings)  # a class may be defined again with others
        if key not in self._made:
            self._made[key] = {setting.field: self._control(key, setting) for setting in settings}
        return self._made[key]

    def _show(self, refused: str = "") -> None:
        chosen, shown = self._choices.method_options(self._field), []
        controls = self.controls
        for setting in self._settings:
            control = controls[setting.field]
            control.value = _to_control(setting, chosen[setting.field])
            if applies(setting.field, chosen):
                shown.append(control)
        self.refusal.value = f'<div class="ss-note bad" role="alert">{safe(refused)}</div>' if refused else ""
        self.children = (*shown, *([self.refusal] if refused else []))
        self.layout.display = None if shown else "none"

    def _control(self, key: tuple[str, str], setting: Setting) -> widgets.DOMWidget:
        control = _make(setting)
        control.tooltip = f"0 leaves it to the default. {setting.help}" if setting.optional else setting.help

        def changed(change: dict[str, Any]) -> None:
            if key == (self._name, repr(self._settings)):
                self._put(setting, change["new"])

        control.observe(changed, "value")
        return control

    def _put(self, setting: Setting, value: Any) -> None:
        try:
            self._choices.set_method_option(self._field, setting.field, _from_control(setting, value))
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
