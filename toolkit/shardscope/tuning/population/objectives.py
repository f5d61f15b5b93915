"""What members are scored by: the objectives of studies, the less the better.

Quality is that at the end of the interval; time, bytes and memory are those of a step in it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from shardscope.errors import SpecError
from shardscope.tuning.definition import check_objectives
from shardscope.tuning.measured import Objective

Scores = Mapping[str, float]
"""By the objectives' names."""


def objectives_of(
    objectives: str | Sequence[str] | Mapping[str, Objective | None],
) -> tuple[tuple[str, ...], dict[str, Objective]]:
    """The names, checked, and those that are functions of the user's.

    Raises:
        SpecError: One is unknown or given twice, there is none, or none says anything of quality.
    """
    names = (objectives,) if isinstance(objectives, str) else tuple(objectives)
    own = {n: f for n, f in objectives.items() if f is not None} if isinstance(objectives, Mapping) else {}
    if not names:
        raise SpecError("objectives=() names none; use for example ('loss', 'bytes')")
    check_objectives(names, own)
    return names, own


def costs_of(scores: Scores, objectives: Sequence[str]) -> tuple[float, ...]:
    """The scores in the order of the objectives."""
    return tuple(scores[name] for name in objectives)
