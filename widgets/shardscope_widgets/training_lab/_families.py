"""The strategies in families, in the order in which training systems evolved, and the settings worth a control.

The families are the chapters of that story; the settings are read from each strategy's own spec.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from shardscope.spec import Compression, Method, registry
from shardscope.spec.strategy import strategies
from shardscope_widgets.form import Setting, option_of, setting_of

_HEADINGS = (
    "As they are", "Shorter floats", "Integers in blocks", "Random rounding", "Signs", "Some of the elements",
    "Low rank", "Now and then",
)  # fmt: skip
"""Of methods of compression, in the order in which they are told; others follow."""
_LABELS = {
    "every": "Average every",
    "update_every": "Adapt every",
    "feedback": "Error feedback",
    "warmup_steps": "Warm-up steps",
    "per_node": "Ranks a node",
    "directions": "Ring directions",
    "trace_chunks": "Chunk by chunk",
    "microbatches": "Micro-batches",
    "staleness": "Staleness bound",
}
_OTHERWISE = {"mode": {"values": (("sync", "sync"), ("async", "async"), ("bounded (ssp)", "ssp"))}}
_LEFT_TO_CODE = {"block", "clip", "bucket_mb", "slice_mb", "gamma", "microbatches"}
"""Settings without a control; the lab's micro-batch says how many micro-batches there are."""
_ONLY_WITH = {"staleness": ("mode", "ssp")}
"""Settings that mean something only beside a certain value of another."""


def strategy_families() -> list[tuple[str, list[str]]]:
    """Each heading with the strategies that stand under it, in the order in which training systems evolved."""
    found: dict[str, list[str]] = {}
    for name, method in strategies().items():
        found.setdefault(method.family, []).append(name)
    return list(found.items())


def compressor_families() -> list[tuple[str, list[str]]]:
    """Each heading with the methods of compression that stand under it."""
    found: dict[str, list[str]] = {heading: [] for heading in _HEADINGS}
    for method in registry.all_of(Compression):
        found.setdefault(method.family, []).append(method.name)
    return [(heading, names) for heading, names in found.items() if names]


def settings_of_method(kind: type[Method], name: str) -> list[Setting]:
    """The settings of a method that a control can hold; sizes of blocks, buckets and slices are left to code."""
    method = registry.require_known(kind, name)
    found = [
        setting_of(method, field, _LABELS.get(field, ""), **_OTHERWISE.get(field, {}))
        for field in method.model_fields
        if field not in _LEFT_TO_CODE
    ]
    return [setting for setting in found if setting.kind != "other"]


def applies(setting: str, chosen: Mapping[str, Any]) -> bool:
    """Whether a setting means something beside what else is chosen."""
    other, value = _ONLY_WITH.get(setting, (None, None))
    return other is None or chosen.get(other) == value


def options_of(method: Method) -> dict[str, Any]:
    """What of a method's settings differs from its defaults."""
    return {name: option_of(value) for name, value in method.changed.items()}
