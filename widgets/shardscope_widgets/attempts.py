"""Attempts of each rank of a run, with start and step times, collected from events as they arrive.

A rank makes one attempt if nothing fails, and another after each restart. An attempt begins with the ``process`` event
of its process. Times are in Unix seconds.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from shardscope.runlog.schema import Event

_NOT_OF_RANKS = frozenset({"restart"})
"""Kinds of events that the agent, not the rank itself, writes into a rank's log."""


@dataclass
class Attempt:
    """One attempt of one rank to train, from the start of its process.

    Attributes:
        rank: The rank.
        begun: Time of the attempt's first event.
        resumed: Step of the checkpoint from which the attempt resumed; 0 if it trains from the beginning.
        first: Start of its first step; None until that step has finished.
        ends: End time of each finished step, beginning with step ``resumed + 1``.
        last: Time of the attempt's newest event.
        error: The error that ended the attempt; None if there was none, or if the process was killed before writing it.
    """

    rank: int
    begun: float
    resumed: int = 0
    first: float | None = None
    ends: array[float] = field(default_factory=lambda: array("d"))
    last: float = 0.0
    error: Event | None = None

    @property
    def last_step(self) -> int:
        """The last step that the attempt finished; before its first step, the step of its checkpoint."""
        return self.resumed + len(self.ends)

    def end_of(self, step: int) -> float | None:
        """Return when a step ended; None if this attempt did not finish it."""
        index = step - self.resumed - 1
        return self.ends[index] if 0 <= index < len(self.ends) else None


@dataclass
class Attempts:
    """The attempts of all ranks.

    Attributes:
        of_rank: Attempts by rank, in the order in which they began.
        saved: Time at which each checkpoint was complete, by step.
    """

    of_rank: dict[int, list[Attempt]] = field(default_factory=dict)
    saved: dict[int, float] = field(default_factory=dict)

    def feed(self, events: Iterable[Event]) -> None:
        """Add new events, which must be in order for each rank."""
        for event in events:
            if event["event"] not in _NOT_OF_RANKS:
                self._take(event)

    def _take(self, event: Event) -> None:
        kind, t = event["event"], float(event["t"])
        attempt = self._attempt(event, t)
        attempt.last = max(attempt.last, t)
        if kind == "step":
            if attempt.first is None:
                attempt.first, attempt.resumed = t - float(event["step_time_s"]), event["step"] - 1
            attempt.ends.append(t)
        elif kind == "resume":
            attempt.resumed = event["step"]
        elif kind == "error":
            attempt.error = event
        elif kind == "checkpoint":
            self.saved[event["step"]] = t

    def _attempt(self, event: Event, t: float) -> Attempt:
        """Return the attempt that an event belongs to; a process that goes back to an earlier step begins a new
        attempt.
        """
        kind, rank = event["event"], event["rank"]
        own = self.of_rank.setdefault(rank, [])
        goes_back = bool(own and own[-1].ends) and (
            kind == "resume" or (kind == "step" and event["step"] <= own[-1].last_step)
        )
        if not own or kind == "process" or goes_back:
            own.append(Attempt(rank, t - float(event["step_time_s"]) if kind == "step" else t, last=t))
        return own[-1]

    def __iter__(self) -> Iterator[Attempt]:
        return (each for own in self.of_rank.values() for each in own)

    @property
    def begun(self) -> float | None:
        """Time of the first event of any rank; None if there is no event yet."""
        return min((own[0].begun for own in self.of_rank.values()), default=None)
