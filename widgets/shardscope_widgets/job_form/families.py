"""Strategies and compression methods by family, and which settings of each method have a control.

Strategy families are listed in historical order. Settings are read from the spec of each method.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from shardscope.methods.strategies.pipeline import SPLITS
from shardscope.spec import Compression, Method, registry
from shardscope.spec.pipeline_schedule import PipelineSchedule
from shardscope.spec.strategy import Strategy, strategies, strategies_where
from shardscope_widgets.kit.form import Setting, named, option_of, setting_of
from shardscope_widgets.words import AXIS_LABELS

_HEADINGS = (
    "Uncompressed", "Shorter floats", "Block quantization", "Stochastic rounding", "Signs", "Sparsification",
    "Low rank", "Periodic averaging",
)  # fmt: skip
"""Families of compression methods in display order; any other families follow."""
_LABELS = AXIS_LABELS | {
    "data": "Along the data axis",
    "stages": "Pipeline schedule",
    "every": "Average every",
    "update_every": "Adapt every",
    "feedback": "Error feedback",
    "warmup_steps": "Warm-up steps",
    "per_node": "Ranks per node",
    "directions": "Ring directions",
    "microbatches": "Micro-batches",
    "staleness": "Staleness bound",
    "budget": "Gradients",
}
_OTHERWISE: dict[str, dict[str, Any]] = {
    "mode": {"values": (("sync", "sync"), ("async", "async"), ("bounded (ssp)", "ssp"))},
    "split": {"kind": "combo", "values": named(SPLITS)},
}
_LEFT_TO_CODE = {"block", "clip", "bucket_mb", "slice_mb", "gamma", "microbatches", "memory_bound"}
"""Settings without a control, which can only be set in code. `microbatches` needs no control, because the
micro-batch size, which has a control, determines it."""
_ONLY_WITH = {"staleness": ("mode", ("ssp",)), "budget": ("mode", ("async", "ssp"))}
"""Settings that apply only if another setting has certain values, as (other setting, values)."""


def strategy_families() -> list[tuple[str, list[str]]]:
    """Return pairs of a family and the names of its strategies, in historical order; several axes come last."""
    found: dict[str, list[str]] = {}
    composite = {each.name: each for each in registry.all_of(Strategy) if each.is_composite}
    for name, method in {**strategies(), **composite}.items():
        found.setdefault(method.family, []).append(name)
    return list(found.items())


def compressor_families() -> list[tuple[str, list[str]]]:
    """Return pairs of a family and the names of its compression methods, in display order."""
    found: dict[str, list[str]] = {heading: [] for heading in _HEADINGS}
    for method in registry.all_of(Compression):
        found.setdefault(method.family, []).append(method.name)
    return [(heading, names) for heading, names in found.items() if names]


def settings_of_method(kind: type[Method], name: str) -> list[Setting]:
    """Return the settings of a method that have a control; block, bucket and slice sizes can only be set in code."""
    method = registry.require_known(kind, name)
    found = [
        setting_of(method, field, _LABELS.get(field, ""), **_otherwise(method, field))
        for field in method.model_fields
        if field not in _LEFT_TO_CODE
    ]
    return [setting for setting in found if setting.kind != "other"]


def _otherwise(method: type[Method], field: str) -> dict[str, Any]:
    if field == "data" and issubclass(method, Strategy) and method.is_composite:
        return {"values": named(strategies_where(lambda strategy: strategy.composes))}
    if field == "stages" and issubclass(method, Strategy) and method.is_composite:
        stages = Strategy.resolve(method.model_fields[field].get_default(call_default_factory=True))
        schedules = registry.all_of(PipelineSchedule)
        return {
            "values": tuple(
                (each.heading(), option_of(stages.replace(schedule=each.name))) for each in schedules
            )
        }
    return _OTHERWISE.get(field, {})


def applies(setting: str, chosen: Mapping[str, Any]) -> bool:
    """Return whether `setting` applies, given the values of the other settings in `chosen`."""
    other, values = _ONLY_WITH.get(setting, (None, ()))
    return other is None or chosen.get(other) in values


def options_of(method: Method) -> dict[str, Any]:
    """Return the settings of a method that differ from its defaults, by name."""
    return {name: option_of(value) for name, value in method.changed.items()}
