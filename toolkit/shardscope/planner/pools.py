"""One search for each recipe and software, with a common ranking of the results."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from typing import Any, NamedTuple

import numpy as np

from shardscope.analytic.layouts import Layouts
from shardscope.planner.asked import Asked
from shardscope.planner.candidates import Candidates, SharedSettings, candidates
from shardscope.planner.emulated import EmulatedDevices
from shardscope.planner.search import Found, RankedRows, search
from shardscope.planner.setting import SearchSettings
from shardscope.planner.space import SearchAxes
from shardscope.spec.layout import OFFLOAD_NAMES, RECOMPUTE_NAMES, Layout, schedule_names


class Pool(NamedTuple):
    """Candidates with one software, precision, optimizer and attention, and the rows that the search kept."""

    setting: SearchSettings
    found: Candidates
    rows: RankedRows


def searched(
    asked: Asked,
    batch: int,
    spaces: Sequence[SearchAxes],
    recipes: Sequence[SharedSettings],
    top: int | None,
    *,
    below_s: float = np.inf,
) -> tuple[list[Pool], list[Found]]:
    """Return two lists, with the candidates and the search result for each recipe, space and software.

    Layouts whose step takes `below_s` seconds or longer may be left out.
    """
    pools, found = [], []
    stages = [zero for space in spaces for zero in space.zero]
    for recipe, space in product(recipes, spaces):
        here = candidates(
            asked.model, asked.cluster, global_batch=batch, space=space, recipe=recipe, stages=stages
        )
        for setting, part in asked.parts(here):
            kept, best = _best(setting, part, top, below_s)
            found.append(best)
            pools.append(Pool(setting, kept, best.rows))
    return pools, found


def _best(
    setting: SearchSettings, part: Candidates, top: int | None, below_s: float
) -> tuple[Candidates, Found]:
    """Return the candidates, and what a search keeps of them."""
    if not isinstance(setting.cluster, EmulatedDevices):
        return part, search(setting, part, keep=top, below_s=below_s)
    from shardscope.planner.jobs import search_jobs  # needs psutil, which web pages lack

    return search_jobs(setting, part, keep=top)


def layout_at(layouts: Layouts, row: int, global_batch: int) -> Layout:
    """Return one row of a table of layouts as a `Layout`."""
    fields: dict[str, Any] = {}
    named: dict[str, Sequence[Any]] = {
        "schedule": schedule_names(), "recompute": RECOMPUTE_NAMES, "offload": OFFLOAD_NAMES,
        "compression": layouts.compressions,
    }  # fmt: skip
    for name in Layout.model_fields:
        if name == "global_batch":
            fields[name] = global_batch
            continue
        value = getattr(layouts, name)
        if isinstance(value, np.ndarray):
            value = int(value[row])
            value = named[name][value] if name in named else value
        fields[name] = value
    fields["sequence_parallel"] = bool(fields["sequence_parallel"])
    whole = fields["shard"] == fields["data"] * fields["context"]
    fields["shard"] = 0 if whole or not fields["zero"] else fields["shard"]
    return Layout(**fields)
