"""The chosen strategy's own settings as controls, made from its spec; they change with the strategy."""

from __future__ import annotations

from typing import Any

import ipywidgets as widgets

from shardscope_widgets.training_lab._choices import Choices
from shardscope_widgets.training_lab._families import Setting, applies, settings_of

MOST = 4096


class StrategyOptions(widgets.GridBox):  # type: ignore[misc]
    """Bound both ways to the trait `options` of `choices`. Each strategy's controls are made once and kept."""

    def __init__(self, choices: Choices) -> None:
        self._choices = choices
        self._made: dict[str, dict[str, widgets.DOMWidget]] = {}
        super().__init__()
        self.add_class("ss-controls")
        self.add_class("ss-options")
        choices.observe(lambda _change: self._show(), ["strategy", "options"])
        self._show()

    @property
    def controls(self) -> dict[str, widgets.DOMWidget]:
        """The controls of the chosen strategy, by field."""
        kind = self._choices.strategy
        if kind not in self._made:
            self._made[kind] = {setting.field: self._control(kind, setting) for setting in settings_of(kind)}
        return self._made[kind]

    def _show(self) -> None:
        kind, chosen = self._choices.strategy, self._choices.all_options
        shown = []
        for setting in settings_of(kind):
            control = self.controls[setting.field]
            control.value = _to_control(setting, chosen[setting.field])
            if applies(kind, setting.field, chosen):
                shown.append(control)
        self.children = tuple(shown)
        self.layout.display = None if shown else "none"

    def _control(self, kind: str, setting: Setting) -> widgets.DOMWidget:
        control = _make(setting)
        control.tooltip = f"0 leaves it to the strategy. {setting.help}" if setting.optional else setting.help

        def changed(change: dict[str, Any]) -> None:
            if self._choices.strategy == kind:
                self._choices.set_option(setting.field, _from_control(setting, change["new"]))

        control.observe(changed, "value")
        return control


def _make(setting: Setting) -> widgets.DOMWidget:
    value = _to_control(setting, setting.default)
    if setting.kind == "choice":
        return widgets.Dropdown(description=setting.label, options=list(setting.values), value=value)
    if setting.kind == "switch":
        return widgets.Checkbox(description=setting.label, value=value, indent=False)
    return widgets.BoundedIntText(description=setting.label, min=0, max=MOST, value=value)


def _to_control(setting: Setting, value: Any) -> Any:
    return 0 if setting.kind == "count" and value is None else value


def _from_control(setting: Setting, value: Any) -> Any:
    return None if setting.optional and value == 0 else value
