"""How good the layout with the shortest predicted time is: the measured time that it loses to the best layout."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from shardscope.measure.scoreboard.rows import Row

NEAR = 0.03
"""Largest loss of a choice that counts as good, relative to the fastest measured layout."""


class Ranking(NamedTuple):
    """Choices among layouts of one model and batch on the same number of devices."""

    groups: int
    """Number of groups with at least two layouts."""
    near: int
    """Number of groups in which the layout that is predicted to be fastest is within `NEAR` of the fastest measured."""
    worst: float
    """Largest loss, in per cent; NaN without groups."""

    @classmethod
    def of(cls, rows: Sequence[Row], predicted: npt.NDArray[np.float64]) -> Ranking:
        """Return the ranking of rows by their predicted times in seconds, in the same order."""
        found = losses(rows, predicted)
        return cls(len(found), sum(loss <= NEAR for loss in found), 100 * max(found, default=float("nan")))


def losses(rows: Sequence[Row], predicted: npt.NDArray[np.float64]) -> list[float]:
    """Return, by group, how much longer the step of the chosen layout is than that of the best, as a fraction.

    A group has rows of one model, software and precision, with one batch and number of devices, whose layouts differ.
    """
    groups: dict[str, list[int]] = defaultdict(list)
    for place, row in enumerate(rows):
        layout = row.layout
        key = (
            layout.num_devices,
            layout.global_batch,
            layout.precision,
            row.software,
            row.cluster.device.name,
        )
        groups[f"{row.model!r} {key}"].append(place)
    found = []
    for places in groups.values():
        if len({repr(rows[place].layout) for place in places}) > 1:
            seconds = np.array([rows[place].seconds for place in places])
            chosen = seconds[int(np.argmin(predicted[places]))]
            found.append(float(chosen / seconds.min() - 1))
    return found
