"""A sentence that says whether a layout fits on a device and, if not, which change would make it fit."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from shardscope.analytic.layouts import Layouts
from shardscope.analytic.memory import device_memory
from shardscope.analytic.recomputation import layers_of_stage
from shardscope.spec.cluster import Device
from shardscope.spec.layout import Layout
from shardscope.spec.model import Transformer
from shardscope.spec.units import gib_text
from shardscope_widgets.figures._memory_plan import KIND_NAMES, MemoryPlanInfo
from shardscope_widgets.words import listed

_FULL: dict[str, Any] = {"recompute": "full", "recompute_layers": 0}
Change = tuple[str, dict[str, Any]]
"""Name of a change to a layout, and the changed field with its new value."""
_CHANGES: tuple[Change, ...] = (
    ("sequence parallelism", {"sequence_parallel": True}),
    ("ZeRO stage 1", {"zero": 1}),
    ("ZeRO stage 2", {"zero": 2}),
    ("selective recomputation", {"recompute": "selective"}),
    ("ZeRO stage 3", {"zero": 3}),
    ("full recomputation", _FULL),
    ("offloading the optimizer", {"offload": "optimizer"}),
    ("offloading everything", {"offload": "all"}),
)
"""Changes to a layout that save memory, with their names, ordered from the smallest time cost to the largest."""
_RECOMPUTES = ("none", "selective", "full")
HOST_BYTES = 256 * 2**30
"""Host memory that one device may use, in bytes: an eighth of a node's 2 TiB."""


class Verdict(NamedTuple):
    """Whether a layout fits, and a sentence that explains the result."""

    fits: bool
    sentence: str


def verdict(
    model: Transformer, layout: Layout, info: MemoryPlanInfo, device: Device | None = None, *, framework: str
) -> Verdict:
    """Return whether the stage that needs the most memory fits on the device and, if not, which change would help."""
    held = info.stages[info.fullest].num_bytes
    spare = info.capacity_bytes - held
    shards_nothing = layout.zero > 0 and layout.data * layout.context == 1
    idle = " With one data rank, ZeRO shards nothing." * shards_nothing
    if spare >= 0:
        return Verdict(True, f"Fits, with {gib_text(spare)} to spare per device.{idle}")
    largest = max(info.stages[info.fullest].blocks, key=lambda block: block.num_bytes)
    kind = KIND_NAMES.get(largest.kind, largest.kind)
    where = f" on {info.stages[info.fullest].name}" if info.stages[1:] else ""
    size = gib_text(largest.num_bytes)
    more = f"{gib_text(-spare)} too much per device{where}"
    problem = f"Does not fit: {more}; the largest block is {kind} ({size}).{idle}"
    return Verdict(False, f"{problem} {_way_out(model, layout, info.capacity_bytes, framework, device)}")


def _way_out(
    model: Transformer, layout: Layout, capacity: float, framework: str, device: Device | None
) -> str:
    """Return advice: the cheapest single change that makes the layout fit, or the most effective if none does."""
    changes = [
        each
        for name, change in _CHANGES
        if _is_more(layout, change)
        for each in (*_in_part(model, layout, change), (name, change))
    ]
    if not changes:
        return "Use more tensor or pipeline ranks, or a smaller micro-batch."
    table = Layouts.of([layout.replace(**change) for _, change in changes])
    held = device_memory(model, table, framework=framework, device=device)
    totals = np.where(held.host <= HOST_BYTES, held.total, np.inf)
    for (name, _), total in zip(changes, totals, strict=True):
        if total <= capacity:
            return f"{name[0].upper()}{name[1:]} would make it fit, with {gib_text(float(total))} per device."
    best = int(totals.argmin())
    name = changes[best][0]
    left = gib_text(float(totals[best]))
    more = listed(_degrees(model, layout))
    return f"No single change is enough: even {name} needs {left} per device. Use more {more}."


def _in_part(model: Transformer, layout: Layout, change: dict[str, Any]) -> list[Change]:
    """Return variants of full recomputation for only some layers, fewest first; empty for any other change."""
    if change is not _FULL:
        return []
    layers = layers_of_stage(model.layers, layout.pipeline * layout.virtual_stages)
    return [
        (
            f"full recomputation of {count} of {layers} layers of each stage",
            change | {"recompute_layers": count},
        )
        for count in range(layout.recompute_layers + 1, layers)
    ]


def _is_more(layout: Layout, change: dict[str, Any]) -> bool:
    """Return whether the change can save memory compared with the layout's current settings."""
    field, value = next(iter(change.items()))
    if field == "sequence_parallel":
        return layout.tensor > 1 and not layout.sequence_parallel
    if field == "zero":
        return layout.data * layout.context > 1 and value > layout.zero
    if field == "recompute":
        more = _RECOMPUTES.index(value) > _RECOMPUTES.index(layout.recompute)
        return more or (value == "full" and layout.recompute_layers > 0)
    return layout.offload == "none" or (value == "all" and layout.offload != "all")


def _degrees(model: Transformer, layout: Layout) -> list[str]:
    """Return the names of the parallel degrees that can still be increased."""
    can = {"tensor ranks": layout.tensor < model.kv_heads, "pipeline stages": layout.pipeline < model.layers}
    return [name for name, grows in can.items() if grows] or ["data-parallel ranks, with ZeRO"]
