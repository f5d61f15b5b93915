"""The strategies in families, in the order in which training systems evolved, and the settings worth a control.

The families are the chapters of that story; the settings are read from each strategy's own spec.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import NoneType
from typing import Annotated, Any, Literal, NamedTuple, Union, get_args, get_origin

from shardscope.spec import Compression, Method, registry
from shardscope.spec.strategy import strategies

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
_WORDS = {"ssp": "bounded (ssp)"}
_LEFT_TO_CODE = {"block", "clip", "bucket_mb", "slice_mb", "gamma", "microbatches"}
"""Settings without a control; the lab's micro-batch says how many micro-batches there are."""
_ONLY_WITH = {"staleness": ("mode", "ssp")}
"""Settings that mean something only beside a certain value of another."""


class Setting(NamedTuple):
    """One setting of a method: what it may be set to, and what it is when left alone.

    `kind` is ``choice`` (among `values`), ``switch``, ``number`` or ``count`` (a whole number; 0 stands for None where
    `optional`).
    """

    field: str
    label: str
    help: str
    kind: str
    default: Any
    values: tuple[tuple[str, Any], ...] = ()
    optional: bool = False


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
    fields = registry.require_known(kind, name).model_fields.items()
    found = [
        setting_of(field, info, _LABELS.get(field), info.get_default(call_default_factory=True))
        for field, info in fields
        if field not in _LEFT_TO_CODE
    ]
    return [setting for setting in found if setting is not None]


def applies(setting: str, chosen: Mapping[str, Any]) -> bool:
    """Whether a setting means something beside what else is chosen."""
    other, value = _ONLY_WITH.get(setting, (None, None))
    return other is None or chosen.get(other) == value


def option_of(value: Any) -> Any:
    """A setting's value as options have it: a method without settings of its own by its name."""
    return value.name if isinstance(value, Method) and not value.changed else value


def options_of(method: Method) -> dict[str, Any]:
    """What of a method's settings differs from its defaults."""
    return {name: option_of(value) for name, value in method.changed.items()}


def setting_of(name: str, info: Any, label: str | None, default: Any) -> Setting | None:
    """A field of a spec as a setting; None where it is neither a choice, a switch nor a number."""
    label = label or name.replace("_", " ").capitalize()
    about = (name, label, " ".join((info.description or label).split()))
    annotation, optional = _without_none(info.annotation)
    if get_origin(annotation) is Annotated:
        annotation = get_args(annotation)[0]
    if get_origin(annotation) is Literal:
        values = tuple((_WORDS.get(value, str(value)), value) for value in get_args(annotation))
        return Setting(*about, "choice", default, values)
    if isinstance(annotation, type) and issubclass(annotation, Method):
        methods = tuple((method.heading(), method.name) for method in registry.all_of(annotation))
        return Setting(*about, "choice", option_of(default), methods)
    if annotation is bool:
        return Setting(*about, "switch", default)
    if annotation is int:
        return Setting(*about, "count", default, optional=optional and default is None)
    if annotation is float:
        return Setting(*about, "number", default)
    return None


def _without_none(annotation: Any) -> tuple[Any, bool]:
    parts = get_args(annotation)
    if get_origin(annotation) is Union or type(annotation).__name__ == "UnionType":
        rest = [part for part in parts if part is not NoneType]
        return (rest[0] if len(rest) == 1 else annotation), len(rest) < len(parts)
    return annotation, False
