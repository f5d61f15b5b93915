"""Range checks for an optimizer's settings: one sentence with the name, the value and the valid range."""

from __future__ import annotations

from typing import Any

from shardscope.errors import SpecError, unknown_name


def check_non_negative(settings: dict[str, Any], *names: str) -> None:
    """Check that each named setting is a number of at least 0."""
    for name in names:
        if not settings[name] >= 0:
            raise SpecError(f"{name}={settings[name]!r} is out of range; use a number of at least 0")


def check_fraction(settings: dict[str, Any], name: str) -> None:
    """Check that the setting, or each number in it, lies in [0, 1)."""
    values = settings[name] if isinstance(settings[name], tuple | list) else [settings[name]]
    if not all(0 <= value < 1 for value in values):
        raise SpecError(f"{name}={settings[name]!r} is out of range; use at least 0 and below 1")


def check_bound(name: str, value: float | None) -> None:
    """Check that the bound is above 0, or None for no bound."""
    if value is not None and not value > 0:
        raise SpecError(f"{name}={value!r} bounds nothing; use a number above 0, or None for no bound")


def check_choice(name: str, value: str, valid: tuple[str, ...]) -> None:
    """Check that the value is one of the valid ones."""
    if value not in valid:
        raise unknown_name(name, value, valid)
