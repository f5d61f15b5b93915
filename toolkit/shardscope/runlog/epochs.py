"""Epochs of a run on shards: step times, cache hits and fetched bytes."""

from __future__ import annotations

from dataclasses import dataclass, field
from statistics import fmean

from shardscope.runlog.schema import Event


@dataclass
class Epoch:
    """One epoch of a run; all counts are sums over ranks.

    Attributes:
        seconds: Times of the finished steps on the slowest rank, in seconds.
        opened: Number of shards that ranks opened in a cache.
        hits: Number of these shards that were already in the cache, from an earlier epoch or run or fetched
            by another rank.
        fetched_bytes: Number of bytes read from a source that is cached or emulated.
    """

    seconds: list[float] = field(default_factory=list)
    opened: int = 0
    hits: int = 0
    fetched_bytes: int = 0

    @property
    def hit_rate(self) -> float | None:
        """Fraction of the opened shards that were in the cache; None if there is no cache."""
        return self.hits / self.opened if self.opened else None

    @property
    def step_time_s(self) -> float | None:
        """Mean duration of a step on its slowest rank, in seconds; None before the first step.

        The median would hide waits for data, which occur in few steps, mostly where a window of shards begins.
        """
        return fmean(self.seconds) if self.seconds else None

    @property
    def time_s(self) -> float:
        """Duration of all finished steps, in seconds."""
        return sum(self.seconds)


class Epochs(dict[int, Epoch]):
    """The epochs of a run, by number from 0; empty unless it trains on shards."""

    def add_counts(self, event: Event) -> None:
        """Add the shards that one rank has opened, from the event of its step."""
        for number, opened, hits, fetched_bytes in event.get("shards", ()):
            epoch = self.setdefault(number, Epoch())
            epoch.opened += opened
            epoch.hits += hits
            epoch.fetched_bytes += fetched_bytes

    def add_step(self, row: list[Event], step_time_s: float) -> None:
        """Add a step that all ranks have finished, and its duration in seconds."""
        number = next((event["epoch"] for event in row if "epoch" in event), None)
        if number is not None:
            self.setdefault(number, Epoch()).seconds.append(step_time_s)

    @property
    def hit_rate(self) -> float | None:
        """Fraction of the opened shards that were in the cache, over the run; None if there is no cache."""
        opened = sum(epoch.opened for epoch in self.values())
        return sum(epoch.hits for epoch in self.values()) / opened if opened else None

    @property
    def fetched_bytes(self) -> int | None:
        """Bytes read from a source that is cached or emulated, over the run; None if there is none."""
        fetched = sum(epoch.fetched_bytes for epoch in self.values())
        return fetched if fetched or self.hit_rate is not None else None
