"""Bounds on the final quality of a trial, from the curves of finished trials. Pure functions.

A curve is a sequence of points (fraction of the samples seen, quality); lower quality values are better, and the last
point is at fraction 1. Trials with different batch sizes take different numbers of steps but see the same samples, so
their curves can be compared.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from shardscope.tuning.measured import TrialMetrics

Point = tuple[float, float]
_COLUMNS = {"loss": 1, "error": 2}


class Improvement(NamedTuple):
    """Largest improvement of any finished trial between a given fraction of its samples and its end."""

    gain: float
    """Largest difference between the quality at that fraction and the final quality, at least 0."""
    factor: float
    """Smallest ratio of the final quality to the quality at that fraction, at most 1."""
    num_trials: int
    """Number of trials that were compared."""

    def best_end(self, quality: float, *, caution: float = 1.0) -> float:
        """Return an optimistic final quality for a trial that is now at `quality`.

        The trial is assumed to improve `caution` times as much as the best finished trial did, both as a difference
        and as a ratio. The result is the higher of the two values: at a high loss the difference is the tighter bound,
        at a low loss the ratio.

        Example:
            >>> Improvement(gain=1.0, factor=0.5, num_trials=4).best_end(0.6)
            0.3
            >>> Improvement(gain=1.0, factor=0.5, num_trials=4).best_end(0.6, caution=2)
            0.15
        """
        if quality <= 0:
            return quality - self.gain * caution
        return max(quality - self.gain * caution, quality * self.factor / caution)


def curve_of(measured: TrialMetrics, objective: str, steps: int) -> list[Point]:
    """Return the curve of a run for ``loss`` or ``error``, without points that are not finite.

    Args:
        measured: Metrics of the run.
        objective: ``loss`` or ``error``.
        steps: Number of steps of the whole run.
    """
    points = [(row[0] / steps, row[_COLUMNS[objective]]) for row in measured.curve]
    return [(share, quality) for share, quality in points if math.isfinite(quality)]


def at(curve: Sequence[Point], share: float) -> float | None:
    """Return the quality at the last evaluation up to the fraction `share` of the samples; None if there was none.

    Example:
        >>> at([(0.25, 2.0), (0.5, 1.5), (1.0, 1.0)], 0.6)
        1.5
    """
    reached = [quality for point, quality in curve if point <= share + 1e-9]
    return reached[-1] if reached else None


def improvement(finished: Iterable[Sequence[Point]], share: float) -> Improvement:
    """Return the largest improvement of any curve from the fraction `share` of its samples to its end.

    Curves without an evaluation up to `share` and curves of unfinished trials are left out.

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
