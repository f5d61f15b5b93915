"""The strategies in families, in the order in which training systems evolved, and the settings worth a control.

The families are the chapters of that story; the settings are read from each strategy's own spec.
"""

from __future__ import annotations

from types import NoneType
from typing import Annotated, Any, Literal, NamedTuple, Union, get_args, get_origin

from shardscope.spec import STRATEGIES, Compression, Method, registry

FAMILIES: dict[str, tuple[str, ...]] = {
    "One process": ("single",),
    "A central server": ("parameter-server",),
    "All-reduce": ("all-reduce", "ring", "tree", "hierarchical"),
    "Without a centre": ("gossip",),
    "Layers apart": ("pipeline",),
    "State in shards": ("zero-1", "zero-2", "zero-3"),
}
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
_WORDS = {"gpipe": "GPipe", "1f1b": "1F1B", "ssp": "bounded (ssp)"}
_LEFT_TO_CODE_ANYWHERE = {"block", "clip"}
_LEFT_TO_CODE = {("pipeline", "microbatches")}
"""Settings without a control: the lab's micro-batch says how many there are."""
_ONLY_WITH = {("parameter-server", "staleness"): ("mode", "ssp")}
"""Settings that mean something only beside a certain value of another."""


class Setting(NamedTuple):
    """One setting of a strategy: what it may be set to, and what it is when left alone.

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


def families() -> list[tuple[str, list[str]]]:
    """Each family with those of its strategies that there are."""
    known = {name: [kind for kind in kinds if kind in STRATEGIES] for name, kinds in FAMILIES.items()}
    return [(name, kinds) for name, kinds in known.items() if kinds]


def compressor_families() -> list[tuple[str, list[str]]]:
    """Each heading with the methods of compression that stand under it."""
    found: dict[str, list[str]] = {heading: [] for heading in _HEADINGS}
    for name in registry.names(Compression):
        found.setdefault(registry.require_known(Compression, name).family, []).append(name)
    return [(heading, names) for heading, names in found.items() if names]


def settings_of_method(kind: type[Method], name: str) -> list[Setting]:
    """The settings of a method that a control can hold; clips and block sizes are left to code."""
    method = registry.require_known(kind, name)
    found = [
        setting_of(field, info, _LABELS.get(field), info.get_default())
        for field, info in method.model_fields.items()
        if field not in _LEFT_TO_CODE_ANYWHERE
    ]
    return [setting for setting in found if setting is not None]


def settings_of(kind: str) -> list[Setting]:
    """The settings of a strategy that are choices, switches or counts; sizes of buckets and slices are left to code."""
    fields = STRATEGIES[kind].model_fields.items()
    found = [
        setting_of(name, info, _LABELS.get(name), info.default)
        for name, info in fields
        if name != "kind" and (kind, name) not in _LEFT_TO_CODE
    ]
    return [setting for setting in found if setting is not None and setting.kind != "number"]


def applies(kind: str, field: str, chosen: dict[str, Any]) -> bool:
    """Whether a setting means something beside what else is chosen."""
    other, value = _ONLY_WITH.get((kind, field), (None, None))
    return other is None or chosen.get(other) == value


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
