"""What members are scored by: figures of a run, the smaller the better, or the larger."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from shardscope.errors import SpecError, unknown_name
from shardscope.runtime.summary import Summary

Scores = Mapping[str, float]
"""By the objectives' names."""


@dataclass(frozen=True)
class Objective:
    """A figure of `Summary`, and whether more of it is better."""

    figure: str
    is_better_larger: bool = False


OBJECTIVES: MappingProxyType[str, Objective] = MappingProxyType(
    {
        "loss": Objective("test_loss"),
        "accuracy": Objective("test_accuracy", is_better_larger=True),
        "seconds": Objective("step_time_s"),
        "bytes": Objective("bytes_per_step"),
    }
)
"""``loss`` and ``accuracy`` on held-back data; ``seconds`` and ``bytes`` a step, by all ranks together."""


def check_objectives(objectives: str | Sequence[str]) -> tuple[str, ...]:
    """The names, checked.

    Raises:
        SpecError: One is unknown or given twice, or there is none.
    """
    names = (objectives,) if isinstance(objectives, str) else tuple(objectives)
    for name in names:
        if name not in OBJECTIVES:
            raise unknown_name("objective", name, OBJECTIVES)
    if not names or len(set(names)) < len(names):
        raise SpecError(
            f"objectives={names!r} names {'one twice' if names else 'none'}; use for example ('loss', 'bytes')"
        )
    return names


def scores_of(summary: Summary, objectives: Sequence[str]) -> tuple[dict[str, float], str | None]:
    """The figures by name, and why they are no scores, in a clause; None where they are."""
    found: dict[str, float] = {}
    for name in objectives:
        value = getattr(summary, OBJECTIVES[name].figure)
        if value is None:
            return {}, f"its {name} was not measured"
        if not math.isfinite(value):
            return {}, f"its {name} became {value}"
        found[name] = float(value)
    return found, None


def costs_of(scores: Scores, objectives: Sequence[str]) -> tuple[float, ...]:
    """The scores such that less is always better."""
    return tuple(-scores[name] if OBJECTIVES[name].is_better_larger else scores[name] for name in objectives)
