"""Ranking of layouts by one metric, or by a weighted sum of several."""

from __future__ import annotations

from collections.abc import Mapping
from numbers import Real

import numpy as np
import numpy.typing as npt

from shardscope.errors import SpecError, quoted, unknown_name

Floats = npt.NDArray[np.float64]
Objective = str | Mapping[str, float]

OBJECTIVES: dict[str, str] = {
    "time": "step time in seconds, shortest first",
    "dollars": "cost of a step in US dollars, lowest first",
    "headroom": "free memory per device in bytes, largest first",
    "tokens_per_s": "tokens per second, highest first",
}
"""Metrics for ranking layouts, with a description of each."""


def objective_weights(objective: Objective, *, has_price: bool) -> dict[str, float]:
    """Return the weight of each metric in an objective.

    Args:
        objective: A key of `OBJECTIVES`, or weights by key.
        has_price: Whether the cluster has a price, which ``dollars`` needs.

    Raises:
        SpecError: The objective is unknown, its weights are invalid, or it needs a price and the cluster has none.

    Example:
        >>> objective_weights("time", has_price=False)
        {'time': 1.0}
    """
    given = objective if isinstance(objective, Mapping) else {objective: 1.0}
    for name, weight in given.items():
        if name not in OBJECTIVES:
            raise unknown_name("objective", name, OBJECTIVES)
        if not isinstance(weight, Real) or not 0 <= weight < np.inf:
            raise SpecError(
                f"objective: the weight {name}={quoted(weight)} is not valid; weights are finite and at least 0"
            )
    weights = {name: float(weight) for name, weight in given.items()}
    if sum(weights.values()) <= 0:
        raise SpecError(f"objective={dict(weights)!r} has no weight above 0; give at least one")
    if weights.get("dollars") and not has_price:
        raise SpecError(
            "objective 'dollars' needs a price: the cluster has none; set price_per_device_hour, or rank by 'time'"
        )
    return weights


def scores(
    weights: Mapping[str, float], time_s: Floats, memory_bytes: Floats, *, capacity_bytes: float
) -> Floats:
    """Return the score of each layout; lower is better.

    In a weighted sum, time, dollars and tokens per second all enter as the step time relative to the shortest step
    time, and headroom enters as the fraction of device memory in use. With equal weights, 10 % of the shortest step
    time thus count as much as 10 % of the device's memory.

    Args:
        weights: Weight of each metric.
        time_s: Step time of each layout, in seconds.
        memory_bytes: Peak memory of each layout, in bytes.
        capacity_bytes: Memory of one device, in bytes.
    """
    fastest = float(time_s.min()) if len(time_s) else 1.0
    slow = sum(weight for name, weight in weights.items() if name != "headroom")
    full = weights.get("headroom", 0.0)
    return np.asarray((slow * time_s / fastest + full * memory_bytes / capacity_bytes) / (slow + full))


def rounded(values: Floats) -> Floats:
    """Round values to 40 binary digits, so that equal values tie on every machine despite differing last digits."""
    digits, exponent = np.frexp(values)
    return np.asarray(np.ldexp(np.round(np.ldexp(digits, 40)), exponent - 40))


def ranking(score: Floats, time_s: Floats, memory_bytes: Floats) -> npt.NDArray[np.intp]:
    """Return the row indices sorted by score; ties are broken by step time, then memory, then row index."""
    return np.lexsort((np.round(memory_bytes), rounded(time_s), rounded(score)))
