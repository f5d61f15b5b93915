"""Scores of members: the same objectives as in studies, all minimised.

Quality is measured at the end of the interval; time, bytes and memory are per step of the interval.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from shardscope.errors import SpecError
from shardscope.tuning.definition import check_objectives
from shardscope.tuning.measured import Objective

Scores = Mapping[str, float]
"""Values of the objectives by name."""


def objectives_of(
    objectives: str | Sequence[str] | Mapping[str, Objective | None],
) -> tuple[tuple[str, ...], dict[str, Objective]]:
    """Return the checked names of the objectives, and the user-defined functions by name.

    Raises:
        SpecError: An objective is unknown or given twice, there are none, or none measures quality.
    """
    names = (objectives,) if isinstance(objectives, str) else tuple(objectives)
    own = {n: f for n, f in objectives.items() if f is not None} if isinstance(objectives, Mapping) else {}
    if not names:
        raise SpecError("objectives=() is empty; use for example ('loss', 'bytes')")
    check_objectives(names, own)
    return names, own


def costs_of(scores: Scores, objectives: Sequence[str]) -> tuple[float, ...]:
    """Return the scores as a tuple, in the order of `objectives`."""
    return tuple(scores[name] for name in objectives)
