"""Replay of one measured step with different durations for its communications.

Every rank has two lanes. On one lane it computes; on the other it packs and communicates sequentially. A communication
starts when every rank has reached it, and each rank keeps its measured gap to the previous operation. The new duration
of a communication is the time by the formula for the new link, plus the software overhead: the measured time minus the
time by the formula for the run's own link.

A computation that directly follows a communication is assumed to have waited for that communication, and waits again in
the replay. A communication inside a computation delays that computation. The exception is the reduction of gradients,
for which a backward pass does not wait.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import reduce
from itertools import zip_longest
from typing import Any

import numpy as np

from shardscope.training.meter import Span

FIRST_SPAN = "data"
"""Name of the first span of every step on every rank."""
_WAITED_GAP_S = (
    1e-3  # a span that starts this soon after the previous one on its lane was waiting for that one
)
_OVERLAPPED = (
    "reduce",
    "packet",
    "gossip",
)  # parts of span names: the backward pass does not wait for these
_BACKGROUND_SPANS = ("server_update",)  # left out, since the exchange that triggers such a span includes it

Time = Any
"""A new time in seconds: a float, or an array with one value per link if the step is replayed on several links."""


def latest(times: Sequence[Time]) -> Time:
    """Return the latest of several times, element-wise if they are arrays over links."""
    if any(isinstance(time, np.ndarray) for time in times):
        return reduce(np.maximum, times)
    return max(times)


@dataclass
class Rank:
    """One rank's spans in a step, and their new times in the replay.

    Attributes:
        computed: Computations, in order and not nested; the last span marks the end of the step.
        sent: Communications, and codec spans for packing and unpacking, in order.
    """

    computed: list[Span]
    sent: list[Span]
    starts: list[Time] = field(default_factory=list)
    """New start times of the first spans in `computed`: of those that have been replayed."""
    ends: list[Time] = field(default_factory=list)
    moved: dict[int, Time] = field(default_factory=dict)
    """New end times of the spans in `sent` that have been replayed, by index."""

    def fresh(self) -> Rank:
        """Return the same spans without new times, for another replay."""
        return Rank(self.computed, self.sent)

    @property
    def communications(self) -> list[int]:
        """Indices of the communications in `sent`; all ranks take part in every communication."""
        return [i for i, span in enumerate(self.sent) if span.lane == "communication"]

    @property
    def compute_s(self) -> float:
        """Compute time in seconds, without the communications that ran inside a computation and delayed it."""
        waited = sum(
            span.seconds
            for inside in self.computed
            for span in self.sent
            if span.lane == "communication" and _holds_up(span, inside)
        )
        return sum(span.seconds for span in self.computed) - waited

    def began(self, index: int) -> Time:
        """Return the time at which this rank can start `sent[index]`; the new ends of earlier items must be known."""
        span = self.sent[index]
        if index and span.start - self.sent[index - 1].end < _WAITED_GAP_S:
            return self.moved[index - 1] + max(0.0, span.start - self.sent[index - 1].end)
        place = max((k for k, inside in enumerate(self.computed) if inside.start <= span.start), default=0)
        self._compute_up_to(place)
        inside = self.computed[place]
        if span.start < inside.end:
            ready = self.starts[place] + span.start - inside.start
            held = [
                self.moved[i] + span.start - s.end
                for i, s in self._inside(place)
                if i < index and s.end <= span.start
            ]
            ready = latest([ready, *held])
        else:
            self._end(place, index)
            ready = self.ends[place] + span.start - inside.end
        return latest([ready, self.moved.get(index - 1, 0.0)])

    def finish(self) -> Time:
        """Return the new end of the step; the new ends of all spans in `sent` must be known."""
        self._compute_up_to(len(self.computed) - 1)
        return self.starts[-1]

    def _inside(self, place: int) -> list[tuple[int, Span]]:
        return [(i, span) for i, span in enumerate(self.sent) if _holds_up(span, self.computed[place])]

    def _end(self, place: int, known: int) -> None:
        """Set the new end of a computation; the new ends of the communications inside it must be known."""
        if len(self.ends) > place:
            return
        span = self.computed[place]
        held = [self.moved[i] + span.end - s.end for i, s in self._inside(place) if i < known]
        self.ends.append(latest([self.starts[place] + span.seconds, *held]))

    def _compute_up_to(self, place: int) -> None:
        for k in range(len(self.starts), place + 1):
            span = self.computed[k]
            if not k:
                self.starts.append(span.start)
                continue
            self._end(k - 1, len(self.sent))
            before, waited = self.computed[k - 1].end, self.ends[k - 1]
            for i, sent in enumerate(self.sent):
                if sent.end <= span.start + _WAITED_GAP_S / 10 and i in self.moved:
                    before = max(before, min(sent.end, span.start))
                    waited = latest([waited, self.moved[i]])
            self.starts.append(waited + span.start - before)


def _holds_up(span: Span, inside: Span) -> bool:
    """Return whether a communication lies inside a computation and delayed that computation."""
    within = inside.start <= span.start and span.end <= inside.end
    return within and not (inside.name == "backward" and any(part in span.name for part in _OVERLAPPED))


def step_of(spans: Sequence[Span], seconds: float) -> Rank:
    """Return a rank's step, built from its spans; `seconds` is its duration from the first computation on."""
    computed: list[Span] = []
    for span in sorted((s for s in spans if s.lane == "compute"), key=lambda s: (s.start, -s.end)):
        nested = computed and span.end <= computed[-1].end
        if not nested and span.name not in _BACKGROUND_SPANS:
            computed.append(span)
    end = max(computed[0].start + seconds, computed[-1].end)
    sent = sorted((s for s in spans if s.lane in ("communication", "codec")), key=lambda s: s.start)
    return Rank([*computed, Span("compute", "end", end, end)], sent)


def replay(ranks: Sequence[Rank], takes: Callable[[Span, float], Time]) -> Time:
    """Replay a step and return its time on the slowest rank, in seconds.

    Args:
        ranks: The steps of all ranks. All ranks that communicate must have the same sequence of communications.
        takes: Function that returns the new duration of a communication (an array for several links). Its arguments
            are the span on the rank that started the communication last, and the measured duration from that start.
    """
    takers = [rank for rank in ranks if rank.communications]
    for together in zip_longest(*(rank.communications for rank in takers)):
        assert None not in together
        spans = [rank.sent[i] for rank, i in zip(takers, together, strict=True)]
        start = latest([_up_to(rank, i) for rank, i in zip(takers, together, strict=True)])
        last = max(spans, key=lambda span: span.start)
        ended = max(span.end for span in spans)
        end = start + takes(last, ended - last.start)
        for rank, i, span in zip(takers, together, spans, strict=True):
            rank.moved[i] = latest(
                [start, end - (ended - span.end)]
            )  # a rank that finished before the others does so again
    return latest([_to_the_end(rank) - rank.starts[0] for rank in ranks])


def _up_to(rank: Rank, index: int) -> Time:
    """Replay the packing before a communication, and return the time at which this rank reaches it."""
    for i in range(len(rank.moved), index):
        rank.moved[i] = rank.began(i) + rank.sent[i].seconds
    return rank.began(index)


def _to_the_end(rank: Rank) -> Time:
    for i in range(len(rank.moved), len(rank.sent)):
        rank.moved[i] = rank.began(i) + rank.sent[i].seconds
    return rank.finish()
