"""Detects a diverged loss: one that ends far above the loss at the start of training, or exploded without recovery."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from shardscope.runlog.figures import LOSS_WINDOW, loss_text
from shardscope.spec.units import three_digits

ABOVE_START = 2.0
"""Loss above which a run has diverged, as a multiple of the loss with which it began. An untrained model is at chance
level; noise does not reach twice that loss, and a run that stays there has lost all that it had learned."""
FEWEST_STEPS = 3
"""Number of steps for which the loss must have stayed above that level, so that one bad batch raises no alarm."""
EXPLODED = 5.0
"""Multiple of the loss at the start above which a loss has exploded if it stays there for `FEWEST_STEPS` steps. The run
has then diverged, unless the loss returns to its earlier level (see `RECOVERED`)."""
RECOVERED = 1.2
"""Multiple of its earlier level up to which an exploded loss counts as recovered; batches differ by several percent."""
FAR_ABOVE_START = 100.0
"""Multiple of the loss at the start above which a single step is a divergence, because no batch alone causes it."""


class Divergence(NamedTuple):
    """A loss that diverged.

    Attributes:
        step: Step at which the loss diverged: the first from which it stayed too high, or the one at which it exploded.
        loss: Loss of the last step.
        start: Loss with which the run began.
    """

    step: int
    loss: float
    start: float

    @property
    def text(self) -> str:
        """The divergence as text: ``diverged at step 4: its loss is 2460, 444 times the initial loss``."""
        times = (
            f", {three_digits(self.loss / self.start)} times the initial loss"
            if np.isfinite(self.loss)
            else ""
        )
        since = " and has not recovered" if self.loss <= ABOVE_START * self.start else ""
        return f"diverged at step {self.step}{since}: its loss is {loss_text(self.loss)}{times}"


def divergence_of(steps: npt.ArrayLike, losses: npt.ArrayLike) -> Divergence | None:
    """Return the divergence of a loss; None if it did not diverge.

    The loss has diverged if its last values, and their mean over `LOSS_WINDOW` steps, exceed `ABOVE_START` times the
    loss of the first step, or if its last value exceeds `FAR_ABOVE_START` times that loss. It has also diverged if it
    exploded, and the median of its last `LOSS_WINDOW` values since exceeds `RECOVERED` times the earlier level, which
    is the loss of the first step, or of the last steps before the explosion if that is higher. A resumed run is
    compared with the mean of its first steps. An unknown loss (NaN) is skipped; an infinite loss counts as diverged.

    Example:
        >>> divergence_of([1, 2, 3, 4, 5], [2.3, 2.2, 90.0, 500.0, 2000.0])
        Divergence(step=3, loss=2000.0, start=2.3)
        >>> divergence_of([1, 2, 3, 4, 5, 6], [2.3, 90.0, 500.0, 80.0, 3.1, 3.0])
        Divergence(step=2, loss=3.0, start=2.3)
    """
    numbers, values = np.asarray(steps, dtype=np.int64), np.asarray(losses, dtype=np.float64)
    known = ~np.isnan(values)
    numbers, values = numbers[known], values[known]
    if len(values) < 2:
        return None
    start = float(values[0] if numbers[0] == 1 else values[:LOSS_WINDOW].mean())
    if start <= 0:
        return None
    first = _first_high(values, start)
    if first is None:
        first = _exploded(values, start)
    return None if first is None else Divergence(int(numbers[first]), float(values[-1]), start)


def _first_high(values: npt.NDArray[np.float64], start: float) -> int | None:
    """Return the index from which on all values are too high; None if there is none, or too few values follow."""
    is_high = values > ABOVE_START * start
    first = len(values) - int(np.argmin(is_high[::-1])) if not is_high.all() else 0
    is_lasting = len(values) - first >= FEWEST_STEPS and values[-LOSS_WINDOW:].mean() > ABOVE_START * start
    return first if is_lasting or values[-1] > FAR_ABOVE_START * start else None


def _exploded(values: npt.NDArray[np.float64], start: float) -> int | None:
    """Return the index at which the values exploded; None if they did not, or are back at their earlier level."""
    if len(values) < FEWEST_STEPS:
        return None
    is_far = values > EXPLODED * start
    places = np.flatnonzero(np.convolve(is_far, np.ones(FEWEST_STEPS), "valid") == FEWEST_STEPS)
    if not len(places):
        return None
    first, since = int(places[0]), values[places[-1] + FEWEST_STEPS :]
    before = values[:first][values[:first] <= ABOVE_START * start]  # not those with which it began to rise
    level = max(start, float(np.median(before[-LOSS_WINDOW:])) if len(before) else 0.0)
    has_recovered = len(since) > 0 and float(np.median(since[-LOSS_WINDOW:])) <= RECOVERED * level
    return None if has_recovered else first
