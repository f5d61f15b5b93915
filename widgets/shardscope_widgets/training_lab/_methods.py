"""Compression methods in families, and the settings of each that are worth a control, read from its spec."""

from __future__ import annotations

from typing import Any

from shardscope.spec.compression import DEFAULTS, Compression
from shardscope_widgets.training_lab._families import Setting, setting_of

FAMILIES: dict[str, tuple[str, ...]] = {
    "As they are": ("none",),
    "Shorter floats": ("fp16", "bf16", "fp8"),
    "Integers in blocks": ("int8", "int4", "adaptive-bits"),
    "Random rounding": ("qsgd", "terngrad", "natural"),
    "Signs": ("sign", "sign-vote", "onebit-adam", "onebit-lamb"),
    "Some of the elements": ("topk", "randomk", "randomblock", "dgc"),
    "Low rank": ("powersgd", "adaptive-rank"),
    "Now and then": ("local-sgd",),
}
_LABELS = {"every": "Average every", "update_every": "Adapt every", "feedback": "Error feedback"}
_LEFT_TO_CODE = {"block", "clip"}


def method_families() -> list[tuple[str, list[str]]]:
    """Each family with those of its methods that there are."""
    return [
        (name, [method for method in methods if method in DEFAULTS]) for name, methods in FAMILIES.items()
    ]


def method_settings(name: str) -> list[Setting]:
    """The settings of a method that have an effect; clips and block sizes are left to code."""
    fields = Compression.model_fields
    found = [
        setting_of(field, fields[field], _LABELS.get(field), default)
        for field, default in DEFAULTS[name].items()
        if field not in _LEFT_TO_CODE
    ]
    return [setting for setting in found if setting is not None]


def method_values(name: str, chosen: dict[str, Any]) -> dict[str, Any]:
    """Every setting of a method by field, defaults included."""
    return {**DEFAULTS[name], **{field: value for field, value in chosen.items() if field in DEFAULTS[name]}}
