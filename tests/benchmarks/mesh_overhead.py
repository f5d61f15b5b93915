"""A step of a layout of one axis against the same strategy's step, taken in turns on the same ranks.

PYTHONPATH=tests python tests/benchmarks/mesh_overhead.py [world_size]

``Layout(data=N)`` is a job of the bare strategy, so its step is the same code. ``mesh`` of the same strategy with one
tensor rank runs it over the context of a data axis. The bar for both: 1.02 of the strategy's own step.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import shardscope as ss
from benchmarks._ranks import by_toolkit, compare_on_ranks
from shardscope.training.context import RankContext

ROUNDS = 100
LAYOUTS: dict[str, dict[str, Any]] = {"ring": {}, "zero-1": {"zero": 1}, "zero-3": {"zero": 3}}


def calls(context: RankContext, *, name: str) -> Mapping[str, Callable[[], object]]:
    """The step of the strategy, of the layout, and of a mesh of one axis."""
    own: dict[str, Any] = {"model": "gpt-nano", "data": "python-source", "batch": 16, "steps": 10**6}
    strategy = ss.Job(**own, strategy=name, world_size=context.world_size)
    layout = ss.Job(**own, layout=ss.Layout(data=context.world_size, **LAYOUTS[name]))
    assert layout == strategy
    mesh = strategy.replace(strategy=ss.Strategy("mesh", data=name))
    jobs = {"strategy": strategy, "layout": layout, "mesh of one axis": mesh}
    return {label: by_toolkit(context, job) for label, job in jobs.items()}


def main() -> None:
    """Compare the strategies' steps."""
    compare_on_ranks(
        {name: partial(calls, name=name) for name in LAYOUTS}, rounds=ROUNDS, baseline="strategy"
    )


if __name__ == "__main__":
    from benchmarks.mesh_overhead import main as run  # the ranks import this module by its name

    run()
