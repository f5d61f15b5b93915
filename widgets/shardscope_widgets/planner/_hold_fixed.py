"""The Planner's dropdowns of layout axes that the search holds fixed."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import ipywidgets as widgets

from shardscope.spec.compression import compression_names
from shardscope.spec.layout import OFFLOAD_NAMES, RECOMPUTE_NAMES, searched_schedules
from shardscope_widgets.words import AXIS_LABELS

ANY = "any"
FILTERS: dict[str, tuple[Any, ...]] = {
    "tensor": (1, 2, 4, 8, 16, 32),
    "pipeline": (1, 2, 4, 8, 16, 32, 64),
    "context": (1, 2, 4, 8, 16),
    "zero": (0, 1, 2, 3),
    "schedule": searched_schedules(),
    "recompute": RECOMPUTE_NAMES,
    "offload": OFFLOAD_NAMES,
    "compression": compression_names()[1:],
}
IN_TOOLTIPS = {
    "tensor": "number of tensor ranks",
    "pipeline": "number of pipeline stages",
    "context": "number of context ranks",
    "zero": "ZeRO stage",
    "recompute": "kind of recomputation",
    "offload": "kind of offloading",
}


class HoldFixed:
    """One dropdown for each axis of `FILTERS`; a value that is not among its options is added to them.

    Args:
        fix: The values to show, as in `plan`.
        take: Called when a dropdown is changed, but not while `show` changes it.
    """

    def __init__(self, fix: Mapping[str, Any], take: Callable[..., None]) -> None:
        self._take, self._is_showing = take, False
        self.controls: dict[str, widgets.Widget] = {}
        for axis in FILTERS:
            control = widgets.Dropdown(
                description=AXIS_LABELS.get(axis, axis.capitalize()),
                options=_options(axis),
                tooltip=f"Search only layouts with this {IN_TOOLTIPS.get(axis, axis)}",
            )
            control.observe(self._changed, "value")
            self.controls[axis] = control
        self.show(fix)

    def show(self, fix: Mapping[str, Any]) -> None:
        """Set all dropdowns to the values of `fix`."""
        self._is_showing = True
        try:
            for axis, control in self.controls.items():
                value = _choice(axis, fix.get(axis, ANY))
                if all(value != known for _, known in control.options):
                    control.options = (*_options(axis), (_words(value), value))
                control.value = value
        finally:
            self._is_showing = False

    def applied_to(self, fix: Mapping[str, Any]) -> dict[str, Any]:
        """Return `fix` with the chosen values; axes without a dropdown keep their values."""
        kept = {axis: value for axis, value in fix.items() if axis not in self.controls}
        chosen = {axis: control.value for axis, control in self.controls.items() if control.value != ANY}
        return {**kept, **chosen}

    def _changed(self, *_ignored: object) -> None:
        if not self._is_showing:
            self._take()


def _options(axis: str) -> tuple[tuple[str, Any], ...]:
    free = "none" if axis == "compression" else ANY
    return ((free, ANY), *((_words(value), value) for value in FILTERS[axis]))


def _choice(axis: str, value: Any) -> Any:
    """Return the value, or several values as a tuple; no compression becomes the dropdown's ``none``."""
    values = tuple(value) if isinstance(value, list | tuple) else (value,)
    if axis == "compression" and values == ("none",):
        return ANY
    return values[0] if len(values) == 1 else values


def _words(value: Any) -> str:
    if isinstance(value, tuple):
        return " or ".join(map(_words, value)) or "nothing"
    return str(getattr(value, "label", value))
