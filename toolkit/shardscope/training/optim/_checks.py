"""Range checks for the settings of an optimizer; an error names the setting, its value and the valid range."""

from __future__ import annotations

from typing import Any

from shardscope.errors import SpecError, unknown_name


def check_non_negative(settings: dict[str, Any], *names: str) -> None:
    """Raise `SpecError` unless each named setting is a number of at least 0."""
    for name in names:
        if not settings[name] >= 0:
            raise SpecError(f"{name}={settings[name]!r} is out of range; use a number of at least 0")


def check_fraction(settings: dict[str, Any], name: str) -> None:
    """Raise `SpecError` unless the setting, or each number in a tuple or list, is in [0, 1)."""
    values = settings[name] if isinstance(settings[name], tuple | list) else [settings[name]]
    if not all(0 <= value < 1 for value in values):
        raise SpecError(f"{name}={settings[name]!r} is out of range; use at least 0 and below 1")


def check_bound(name: str, value: float | None) -> None:
    """Raise `SpecError` unless the upper bound `value` is a number above 0, or None for no bound."""
    if value is not None and not value > 0:
        raise SpecError(f"{name}={value!r} is out of range; use a number above 0, or None for no bound")


def check_choice(name: str, value: str, valid: tuple[str, ...]) -> None:
    """Raise `SpecError` unless `value` is one of `valid`."""
    if value not in valid:
        raise unknown_name(name, value, valid)
