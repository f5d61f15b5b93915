"""How good a trial may still become, told from the curves of those that have finished. Pure functions.

A curve is a sequence of points (share of the samples seen, quality), the quality the lower the better, the last point
at share 1. Trials of other batches have other steps but, as samples are kept equal, the same shares.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from shardscope.tuning.measured import Measured

Point = tuple[float, float]
_COLUMNS = {"loss": 1, "error": 2}


class Improvement(NamedTuple):
    """The most that any of some finished trials gained after a share of their samples, and over how many that goes."""

    gain: float
    """Quality there less quality at the end, at least 0."""
    factor: float
    """Quality at the end over quality there, at most 1."""
    num_trials: int

    def best_end(self, quality: float, *, caution: float = 1.0) -> float:
        """The end of a trial that stands at `quality` and improves `caution` times as much as the best of them did.

        In difference and in proportion, and the higher of the two: from a high loss differences bound more, from a low
        one proportions.

        Example:
            >>> Improvement(gain=1.0, factor=0.5, num_trials=4).best_end(0.6)
            0.3
            >>> Improvement(gain=1.0, factor=0.5, num_trials=4).best_end(0.6, caution=2)
            0.15
        """
        if quality <= 0:
            return quality - self.gain * caution
        return max(quality - self.gain * caution, quality * self.factor / caution)


def curve_of(measured: Measured, objective: str, steps: int) -> list[Point]:
    """The curve of a run of `steps` for ``loss`` or ``error``; points that are not finite are left out."""
    points = [(row[0] / steps, row[_COLUMNS[objective]]) for row in measured.curve]
    return [(share, quality) for share, quality in points if math.isfinite(quality)]


def at(curve: Sequence[Point], share: float) -> float | None:
    """The quality when the curve was last evaluated by `share`; None where it had not been yet.

    Example:
        >>> at([(0.25, 2.0), (0.5, 1.5), (1.0, 1.0)], 0.6)
        1.5
    """
    reached = [quality for point, quality in curve if point <= share + 1e-9]
    return reached[-1] if reached else None


def improvement(finished: Iterable[Sequence[Point]], share: float) -> Improvement:
    """What the best improver gained from `share` to the end.

    A curve that was not evaluated by then says nothing about it and is left out; so is one that has no end.

    Example:
        >>> improvement([[(0.5, 2.0), (1.0, 1.0)], [(0.5, 0.4), (1.0, 0.1)]], 0.5)
        Improvement(gain=1.0, factor=0.25, num_trials=2)
    """
    ends = [
        (here, curve[-1][1])
        for curve in finished
        if curve and curve[-1][0] >= 1 - 1e-9 and (here := at(curve, share)) is not None
    ]
    gain = max((here - end for here, end in ends), default=0.0)
    factor = min((end / here for here, end in ends if here > 0), default=1.0)
    return Improvement(max(gain, 0.0), min(factor, 1.0), len(ends))
