"""Ranking of layouts by one measure, or by a weighted mix of several."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import numpy.typing as npt

from shardscope.errors import SpecError, unknown_name

Floats = npt.NDArray[np.float64]
Objective = str | Mapping[str, float]

OBJECTIVES: dict[str, str] = {
    "time": "seconds of a step, fewest first",
    "dollars": "US dollars of a step, fewest first",
    "headroom": "bytes left on the fullest device, most first",
    "tokens_per_s": "tokens a second, most first",
}
"""Measures by which layouts can be ranked."""


def known_objective(objective: Objective, *, has_price: bool) -> dict[str, float]:
    """Return the weights of an objective, by measure.

    Raises:
        SpecError: The objective is unknown, its weights are invalid, or it needs a price and there is none.

    Example:
        >>> known_objective("time", has_price=False)
        {'time': 1.0}
    """
    weights = {objective: 1.0} if isinstance(objective, str) else {k: float(v) for k, v in objective.items()}
    for name, weight in weights.items():
        if name not in OBJECTIVES:
            raise unknown_name("objective", name, OBJECTIVES)
        if not (weight >= 0 and np.isfinite(weight)):
            raise SpecError(
                f"objective: the weight {name}={weight} is not valid; weights are finite and at least 0"
            )
    if sum(weights.values()) <= 0:
        raise SpecError(f"objective={dict(weights)!r} weighs nothing; give at least one weight above 0")
    if weights.get("dollars") and not has_price:
        raise SpecError(
            "objective 'dollars' needs a price: the cluster has none; set price_per_device_hour, or rank by 'time'"
        )
    return weights


def scores(
    weights: Mapping[str, float], time_s: Floats, memory_bytes: Floats, *, capacity_bytes: float
) -> Floats:
    """Score of each layout, lower is better.

    In a mix, time, dollars and tokens per second count in multiples of the fastest layout's step time, and memory as
    the used share of the device. Weights of 1 and 1 thus trade 10 % more time for 10 % of the device.
    """
    fastest = float(time_s.min()) if len(time_s) else 1.0
    slow = sum(weight for name, weight in weights.items() if name != "headroom")
    full = weights.get("headroom", 0.0)
    return np.asarray((slow * time_s / fastest + full * memory_bytes / capacity_bytes) / (slow + full))


def ranking(score: Floats, time_s: Floats, memory_bytes: Floats) -> npt.NDArray[np.intp]:
    """Row indices by score; ties go to less time, then less memory, then the earlier row."""
    return np.lexsort((memory_bytes, time_s, score))
