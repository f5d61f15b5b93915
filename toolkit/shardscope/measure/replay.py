"""One measured step played again with other times for its communications.

Every rank has two lanes. On one it computes; on the other it packs and communicates, one thing after the other. A
communication begins when every rank has come to it: as long after what its rank did before it as was measured. It then
takes as long as it did beyond the formula for its own link (which is what the software costs), and as the formula for
the other link says. What was computed after a communication had ended, with nothing computed in between, waited for it,
and does again. A communication inside a computation holds it up, except for those that a backward pass leaves behind:
those that reduce gradients.
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
"""Of every step on every rank."""
_AT_ONCE_S = 1e-3  # what starts so soon after another on its lane was waiting for it
_LEFT_BEHIND = ("reduce", "packet", "gossip")  # in the names of what a backward pass does not wait for
_ON_THREADS_OF_THEIR_OWN = ("server_update",)  # part of the exchange that they answer

Time = Any
"""A new time: a float, or an array with one for each of several links that the step is played on at once."""


def latest(times: Sequence[Time]) -> Time:
    """The latest, link by link."""
    if any(isinstance(time, np.ndarray) for time in times):
        return reduce(np.maximum, times)
    return max(times)


@dataclass
class Rank:
    """One rank's step.

    Attributes:
        computed: Spans on the first lane, in order, none inside another; the last one stands for the step's end.
        sent: Communication and codec spans, in order.
    """

    computed: list[Span]
    sent: list[Span]
    starts: list[Time] = field(default_factory=list)
    """New starts of `computed`, as far as known."""
    ends: list[Time] = field(default_factory=list)
    moved: dict[int, Time] = field(default_factory=dict)
    """New ends of `sent`, as far as known."""

    def fresh(self) -> Rank:
        """The same step, not yet played again."""
        return Rank(self.computed, self.sent)

    @property
    def communications(self) -> list[int]:
        """Which of `sent` all ranks take part in."""
        return [i for i, span in enumerate(self.sent) if span.lane == "communication"]

    @property
    def compute_s(self) -> float:
        """Time computed, without what a computation waited for inside."""
        waited = sum(
            span.seconds
            for inside in self.computed
            for span in self.sent
            if span.lane == "communication" and _holds_up(span, inside)
        )
        return sum(span.seconds for span in self.computed) - waited

    def began(self, index: int) -> Time:
        """The new start of `sent[index]`, if no other rank is waited for; all before it are known."""
        span = self.sent[index]
        if index and span.start - self.sent[index - 1].end < _AT_ONCE_S:
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
        """The new end of the step, once all of `sent` is known."""
        self._compute_up_to(len(self.computed) - 1)
        return self.starts[-1]

    def _inside(self, place: int) -> list[tuple[int, Span]]:
        return [(i, span) for i, span in enumerate(self.sent) if _holds_up(span, self.computed[place])]

    def _end(self, place: int, known: int) -> None:
        """Set the new end of a computation whose communications inside are known."""
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
                if sent.end <= span.start + _AT_ONCE_S / 10 and i in self.moved:
                    before = max(before, min(sent.end, span.start))
                    waited = latest([waited, self.moved[i]])
            self.starts.append(waited + span.start - before)


def _holds_up(span: Span, inside: Span) -> bool:
    """Whether a communication is one that this computation waited for in its middle."""
    within = inside.start <= span.start and span.end <= inside.end
    return within and not (inside.name == "backward" and any(part in span.name for part in _LEFT_BEHIND))


def step_of(spans: Sequence[Span], seconds: float) -> Rank:
    """A rank's step out of its spans, with its seconds from the first span on."""
    computed: list[Span] = []
    for span in sorted((s for s in spans if s.lane == "compute"), key=lambda s: (s.start, -s.end)):
        nested = computed and span.end <= computed[-1].end
        if not nested and span.name not in _ON_THREADS_OF_THEIR_OWN:
            computed.append(span)
    end = max(computed[0].start + seconds, computed[-1].end)
    sent = sorted((s for s in spans if s.lane in ("communication", "codec")), key=lambda s: s.start)
    return Rank([*computed, Span("compute", "end", end, end)], sent)


def replay(ranks: Sequence[Rank], takes: Callable[[Span, float], Time]) -> Time:
    """Play a step again; returns how long it took the rank that it took longest.

    Args:
        ranks: Of which those that communicate at all have their communications in common, in order.
        takes: The new duration of a communication, from its span on the rank that came last to it, and the time that it
            took from then on. For several links at once: an array of them.
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
            rank.moved[i] = latest([start, end - (ended - span.end)])  # whoever was done earlier is so again
    return latest([_to_the_end(rank) - rank.starts[0] for rank in ranks])


def _up_to(rank: Rank, index: int) -> Time:
    """Pack what is packed before a communication; returns when this rank comes to it."""
    for i in range(len(rank.moved), index):
        rank.moved[i] = rank.began(i) + rank.sent[i].seconds
    return rank.began(index)


def _to_the_end(rank: Rank) -> Time:
    for i in range(len(rank.moved), len(rank.sent)):
        rank.moved[i] = rank.began(i) + rank.sent[i].seconds
    return rank.finish()
