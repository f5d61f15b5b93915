"""Limit a search to layouts that the named software supports, and report the time that other layouts would save.

Only axes that the caller leaves open are limited: an axis named in `fix` or `space` is searched as given.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from shardscope.calibration.software import assumed_software, software_of
from shardscope.planner.asked import Asked
from shardscope.planner.candidates import SharedSettings
from shardscope.planner.pools import layout_at, searched
from shardscope.planner.space import SearchAxes
from shardscope.spec.divisors import divisors
from shardscope.spec.layout import Layout
from shardscope.spec.layout_rules import recomputes_all
from shardscope.spec.model import Transformer
from shardscope.spec.units import listed

LEAST_SAVED = 0.01
"""Smallest saving that is reported, as a fraction of the step time."""


class Beyond(NamedTuple):
    """The fastest layout of a search that is not limited to what the software ships."""

    layout: Layout
    step_time_s: float
    lacking: str
    """Features of this layout that its software does not ship, as text."""
    software: str
    """The software that would run this layout."""


class SoftwareLimits(NamedTuple):
    """Search spaces limited to what each software ships, by name of the software, and the space without these
    limits.
    """

    spaces: Mapping[str, SearchAxes]
    wider: SearchAxes

    def leave_out(self, layout: Layout, software: str) -> bool:
        """Return whether a layout is missing from its software's space because the software does not ship it."""
        space, is_piped = self.spaces.get(software, self.wider), layout.pipeline > 1
        found: dict[str, Any] = {
            "zero": layout.zero,
            "offload": layout.offload,
            "context": layout.context,
            "shard": "node" if layout.shard else "all",
            "pipeline": layout.pipeline,
            "tensor": layout.tensor,
        }
        if is_piped:
            found |= {"schedule": layout.schedule, "zero_in_pipelines": layout.zero}
        if layout.zero < dict(space.zero_for_offload).get(layout.offload, 0):
            return True
        if layout.offload in space.full_for_offload and not recomputes_all(layout):
            return True
        tried = {name: (getattr(space, name), getattr(self.wider, name)) for name in found}
        return any(
            here != all_ and here is not None and found[name] not in here
            for name, (here, all_) in tried.items()
        )


def shipped_space(
    space: SearchAxes,
    software: str,
    *,
    model: Transformer,
    optimizers: Iterable[str],
    devices: int,
    given: Collection[str],
) -> SearchAxes:
    """Limit a search space to what the software ships.

    Args:
        space: The values to try.
        software: Name of the framework.
        model: The model; software may not support some of its layouts.
        optimizers: Names of the optimizers that are tried.
        devices: Number of devices, which all degrees divide.
        given: Axes that the caller has set, which remain unchanged.
    """
    shipped = software_of(software).shipped
    every = {**shipped.axes(), **shipped.axes_for(model, optimizers)}
    for name in {"tensor", "context"} & every.keys():
        every[name] = tuple(each for each in divisors(devices) if each in every[name])
    axes: dict[str, Any] = {name: values for name, values in every.items() if name not in given}
    if (
        shipped.zero_in_pipelines
        and not {"zero", "pipeline"} <= {*given}
        and "zero_in_pipelines" not in given
    ):
        axes["zero_in_pipelines"] = shipped.zero_in_pipelines
    tried = axes.get("offload", space.offload)
    if not {"zero", "offload"} <= {*given} and "zero_for_offload" not in given:
        pairs = tuple(pair for pair in shipped.zero_for_offload if pair[0] in tried)
        axes |= {"zero_for_offload": pairs} if pairs else {}
    is_asked = "offload" in given and {"recompute", "recompute_layers"} & {*given}
    if not is_asked and "full_for_offload" not in given:
        moved = tuple(each for each in shipped.full_for_offload if each in tried)
        axes |= {"full_for_offload": moved} if moved else {}
    return space.fixed(axes)


def suggested_spaces(space: SearchAxes) -> dict[str, SearchAxes]:
    """Return the space divided by the software that its ZeRO stages and kinds of offloading suggest."""
    named = {
        (zero, offload): assumed_software(Layout(zero=zero, offload=offload)).software.name
        for zero in space.zero
        for offload in space.offload
    }
    return {
        name: space.fixed({
            "zero": [zero for zero in space.zero if name in {named[zero, each] for each in space.offload}],
            "offload": [each for each in space.offload if name in {named[zero, each] for zero in space.zero}],
        })
        for name in dict.fromkeys(named.values())
    }  # fmt: skip


def lacking(software: str, layout: Layout, model: Transformer) -> str:
    """Return the features of a layout that the software does not ship, as text; empty if there are none, or if the
    software is unknown.
    """
    return " and ".join(software_of(software).shipped.lacks(layout, model)) if software else ""


def fastest_beyond(
    asked: Asked, batch: int, limits: SoftwareLimits, recipes: Sequence[SharedSettings], below_s: float
) -> Beyond | None:
    """Return the fastest layout of the unlimited space; None if the limited space contains it.

    `below_s` is the step time of the fastest layout in the limited space, in seconds.
    """
    pools, _ = searched(asked, batch, [limits.wider], recipes, 1, below_s=below_s)
    pool = min(pools, key=lambda each: each.rows.time_s.min(initial=np.inf))
    if not len(pool.rows.time_s):
        return None
    row = pool.rows.at(np.array([pool.rows.time_s.argmin()]))
    layout = layout_at(pool.found.layouts(*row[:4]), 0, batch)
    software = pool.setting.calibration.software
    if not limits.leave_out(layout, software):
        return None
    return Beyond(layout, float(row.time_s[0]), lacking(software, layout, asked.model), software)


def limited_texts(names: Collection[str], beyond: Beyond | None, fastest_s: float) -> list[str]:
    """Return sentences on the limits of a search, and on how much faster the fastest excluded layout is.

    Args:
        names: Names of the software.
        beyond: The fastest excluded layout; None if there is none.
        fastest_s: Step time of the fastest layout found, in seconds.
    """
    labels = [software_of(name).label for name in names]
    texts = [f"only settings that {listed(labels)} support{'s' * (len(labels) == 1)} were searched"]
    saved = 0.0 if beyond is None else 1 - beyond.step_time_s / fastest_s
    if beyond is None or saved < LEAST_SAVED:
        return texts
    who = "it" if len(labels) == 1 else software_of(beyond.software).label
    return [
        *texts,
        f"{beyond.lacking}, which {who} does not support, would make the step {saved:.0%} shorter",
    ]


def unshipped_texts(software: str, missing: str, *, is_named: bool) -> list[str]:
    """Return sentences for a table that may contain layouts which the software does not ship.

    Args:
        software: The best plan's software.
        missing: Features of the best plan that this software does not ship.
        is_named: Whether the caller named the software.
    """
    label = software_of(software).label
    cure = f"; software={software!r} searches only what it supports"
    if missing:
        return [f"{label} does not support {missing}{cure * (not is_named)}"]
    return [] if is_named else [f"layouts that {label} does not support were searched too{cure}"]
