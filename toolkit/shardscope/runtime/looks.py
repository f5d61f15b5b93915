"""Looks at a run's layers, kept in bounded memory while the run goes on.

Of many looks every second, fourth, ... is kept, evenly over the whole run, and always the first, the newest, and the
first in which something is no number: what `runtime.alarms` says of these is what it says of all.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from shardscope.runtime.layers import Event, Layers, layers_of
from shardscope.runtime.summary import number
from shardscope.spec import Optimizer

MOST_LOOKS = 240
"""Kept at once, but for the first that is no number."""
_COLUMNS = ("ratio", "weight_norm", "update_norm")


@dataclass
class Looks:
    """What ranks told of their layers, thinned as it comes.

    Attributes:
        num_looks: Steps looked at so far, kept or not.
        num_events: Taken so far.
    """

    num_looks: int = 0
    num_events: int = 0
    _kept: dict[int, dict[int, Event]] = field(default_factory=dict)
    _places: dict[int, int] = field(default_factory=dict)
    """Which look a kept step was, from 0."""
    _every: int = 1
    _newest: int = -1
    _broken: int | None = None

    @classmethod
    def of(cls, events: Iterable[Event]) -> Looks:
        """The looks that these events tell of, in the order of their time."""
        looks = cls()
        for event in events:
            looks.take(event)
        return looks

    def take(self, event: Event) -> None:
        """One rank's look."""
        self.num_events += 1
        step = event["step"]
        if step > self._newest:
            self._begin(step)
        if step not in self._kept:
            return  # left out before this rank came to it
        self._kept[step][event["rank"]] = event
        if self._broken is None and not _is_finite(event):
            self._broken = step

    def layers(self, optimizer: Optimizer | None) -> Layers:
        """The layers as the looks that are kept tell of them."""
        return layers_of((event for ranks in self._kept.values() for event in ranks.values()), optimizer)

    def _begin(self, step: int) -> None:
        before, self._newest = self._newest, step
        self._kept[step], self._places[step] = {}, self.num_looks
        self.num_looks += 1
        self._drop([before])
        while len(self._kept) > MOST_LOOKS:
            self._every *= 2
            self._drop(list(self._kept))

    def _drop(self, steps: Iterable[int]) -> None:
        for step in steps:
            if step not in (self._newest, self._broken) and self._places.get(step, 0) % self._every:
                del self._kept[step], self._places[step]


def _is_finite(event: Event) -> bool:
    columns: list[Iterable[Any]] = [event[name] for name in _COLUMNS]
    owed = (row[2] for row in event["owed"])
    return all(math.isfinite(sum(map(number, filter(None, column)))) for column in (*columns, owed))
