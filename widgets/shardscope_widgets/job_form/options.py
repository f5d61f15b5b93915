"""Controls for the settings of the selected method, generated from its spec; each method has its own controls."""

from __future__ import annotations

from typing import Any

import ipywidgets as widgets
from traitlets import TraitError

from shardscope_widgets.job_form.choices import KINDS, JobChoices
from shardscope_widgets.job_form.families import applies, settings_of_method
from shardscope_widgets.kit.controls import MOST, control_of, field, show, typed
from shardscope_widgets.kit.form import Setting
from shardscope_widgets.kit.markup import classed
from shardscope_widgets.words import AXIS_LABELS, safe


class Options(widgets.VBox):  # type: ignore[misc]
    """A box of controls for the settings of the method selected in the trait `field` of `choices`.

    Controls and traits are synchronised; the controls of a method are created only once. A value that `choices`
    rejects is undone, and `refusal` shows the reason until a value is accepted.
    """

    def __init__(self, choices: JobChoices, field: str) -> None:
        self._choices, self._field = choices, field
        self._made: dict[tuple[str, str], dict[str, widgets.DOMWidget]] = {}
        self._fields: dict[widgets.DOMWidget, widgets.VBox] = {}
        self.refusal = classed(widgets.HTML(), "ss-refusal")
        super().__init__()
        classed(self, "ss-controls", "ss-options")
        choices.observe(lambda _change: self._show(), [field, f"{field}_options", "model"])
        self._show()

    @property
    def _name(self) -> str:
        return str(getattr(self._choices, self._field))

    @property
    def _settings(self) -> list[Setting]:
        return settings_of_method(KINDS[self._field], self._name)

    @property
    def controls(self) -> dict[str, widgets.DOMWidget]:
        """Controls of the selected method, by the name of the setting."""
        name, settings = self._name, self._settings
        key = name, repr(settings)  # the user can redefine a method's class with other settings
        if key not in self._made:
            self._made[key] = {setting.field: self._control(key, setting) for setting in settings}
        return self._made[key]

    def in_axes(self) -> list[str]:
        """Return the settings whose controls are beside the degrees: those of an axis that are not its degree."""
        degrees = self._choices.degrees if self._field == "strategy" else {}
        return [
            setting.field
            for setting in self._settings
            if setting.field in degrees and setting.kind != "count"
        ]

    def _show(self, refused: str = "") -> None:
        chosen, shown = self._choices.method_options(self._field), []
        controls, in_axes = self.controls, self.in_axes()
        for setting in self._settings:
            control = controls[setting.field]
            show(control, chosen[setting.field])
            is_degree = setting.kind == "count" and setting.field in AXIS_LABELS
            if applies(setting.field, chosen) and not (is_degree or setting.field in in_axes):
                shown.append(self._fields.setdefault(control, field(control)))
        self.refusal.value = f'<div class="ss-note bad" role="alert">{safe(refused)}</div>' if refused else ""
        self.children = (*shown, *([self.refusal] if refused else []))
        self.layout.display = None if shown else "none"

    def _control(self, key: tuple[str, str], setting: Setting) -> widgets.DOMWidget:
        control = control_of(
            setting._replace(least=0, most=MOST)
        )  # the spec rejects values that are too large

        def changed(_change: object) -> None:
            if key == (self._name, repr(self._settings)):
                self._put(setting, typed(control))

        control.observe(changed, "value")
        return control

    def _put(self, setting: Setting, value: Any) -> None:
        try:
            self._choices.set_method_option(self._field, setting.field, value)
        except TraitError as error:
            self._show(refused=str(error))
