"""A micro-batch for whoever does not care which: pipelines cannot do with the whole batch at once."""

from __future__ import annotations

from shardscope.spec.strategy import StrategySpec

A_RANK = 2
"""Micro-batches a rank that a pipeline is given, so that its bubble is no longer than half its work."""


def suited_micro_size(strategy: StrategySpec, global_size: int, world_size: int) -> int | None:
    """Samples in a micro-batch with which the strategy runs; None for one that takes a rank's whole share at once.

    A pipeline gets the fewest micro-batches that are at least `A_RANK` for each rank, or as many as there can be.
    """
    accepts = getattr(strategy, "accepts", None)
    if accepts is None:
        return None
    counts = [n for n in range(1, global_size + 1) if global_size % n == 0 and accepts(n, world_size)]
    enough = [count for count in counts if count >= A_RANK * world_size]
    return global_size // (min(enough) if enough else max(counts)) if counts else None
