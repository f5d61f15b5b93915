"""One training step as a list of events: the computations of each rank, the messages between ranks, and the changes of
memory.

Three producers build this structure: `shardscope.runlog.recorded_step` from the log of a run,
`shardscope.simulate.step_events` from a prediction, and `Simulation.timeline` from a simulation. The step player and
its pictures read only this structure. All times are in seconds from the start of the step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal, NamedTuple

from shardscope.runlog.schema import MEMORY_KINDS
from shardscope.spec.look import Arrangement

MESSAGE = "message"
"""Lane of the events that are messages from one rank to another."""
Origin = Literal["measured", "predicted", "simulated"]


class StepEvent(NamedTuple):
    """One activity of one rank, or one message that it sends."""

    rank: int
    """The rank that computes, or that sends the message."""
    lane: str
    """``compute``, ``communication``, ``codec`` or ``message``."""
    kind: str
    """Name of the activity, such as ``forward``, or of the collective that a message belongs to."""
    start_s: float
    end_s: float
    """End of the activity, or arrival of the message."""
    peer: int | None = None
    """The rank that receives the message; None for other events."""
    num_bytes: int = 0
    """Bytes that the rank sends: those of the message, or of a whole collective whose messages are unknown."""
    item: str = ""
    """What the message carries or the activity works on, such as ``chunk 1 of the gradients``."""
    phase: str = ""
    """Part of the collective, such as ``reduce-scatter, round 2 of 3``."""


class MemoryPoint(NamedTuple):
    """Bytes that a rank holds from one moment on, by type of memory in the order of `MEMORY_KINDS`."""

    rank: int
    at_s: float
    held: tuple[int, ...]


@dataclass(frozen=True)
class StepEvents:
    """The events of one training step on all ranks.

    Attributes:
        label: Name of the run or the job.
        origin: Whether the events were measured, predicted or simulated.
        arrangement: How the ranks are connected.
        world_size: Number of ranks.
        step: Number of the step, from 1.
        step_time_s: Length of the step, in seconds.
        events: Events in order of their start.
        memory: Changes of memory, in order of time.
        roles: Role of each rank, such as ``server``; None for ranks without a special role.
        note: Sentences on approximations; empty if there are none.
    """

    label: str
    origin: Origin
    arrangement: Arrangement
    world_size: int
    step: int
    step_time_s: float
    events: tuple[StepEvent, ...]
    memory: tuple[MemoryPoint, ...] = ()
    roles: tuple[str | None, ...] = ()
    note: str = ""

    @cached_property
    def messages(self) -> tuple[StepEvent, ...]:
        """The messages between ranks, in order of their start."""
        return tuple(event for event in self.events if event.lane == MESSAGE)

    @property
    def sent_bytes(self) -> list[int]:
        """Bytes that each rank sends in the step, by rank."""
        sent = [0] * self.world_size
        for event in self.events:
            sent[event.rank] += event.num_bytes
        return sent

    @property
    def peak_bytes(self) -> list[int]:
        """Peak memory of each rank over all types together, in bytes, by rank; empty if memory is unknown."""
        if not self.memory:
            return []
        return [
            max((sum(point.held) for point in self.memory if point.rank == rank), default=0)
            for rank in range(self.world_size)
        ]

    def to_dict(self) -> dict[str, Any]:
        """Return all values in a JSON-compatible form, with the strings of all events in one table."""
        texts: dict[str, int] = {}

        def index(text: str) -> int:
            return texts.setdefault(text, len(texts))

        rows = [
            [e.rank, index(e.lane), index(e.kind), _us(e.start_s), _us(e.end_s), -1 if e.peer is None else e.peer,
             e.num_bytes, index(e.item), index(e.phase)]
            for e in self.events
        ]  # fmt: skip
        return {
            "label": self.label, "origin": self.origin, "shape": self.arrangement.shape,
            "hubs": list(self.arrangement.hubs), "axes": [[*axis] for axis in self.arrangement.axes],
            "world_size": self.world_size, "step": self.step,
            "duration_us": _us(self.step_time_s), "events": rows, "texts": list(texts),
            "memory": [[point.rank, _us(point.at_s), *point.held] for point in self.memory],
            "memory_kinds": list(MEMORY_KINDS), "roles": [role or "" for role in self.roles], "note": self.note,
        }  # fmt: skip


def ring_phase(k: int, last: int) -> str:
    """Return the name of round `k` of a ring all-reduce, whose two halves have `last` rounds each."""
    return f"{'reduce-scatter' if k < last else 'all-gather'}, round {k % last + 1} of {last}"


def _us(seconds: float) -> float:
    return round(seconds * 1e6, 2)


def in_order(events: Sequence[StepEvent]) -> tuple[StepEvent, ...]:
    """Return events sorted by start, then by rank."""
    return tuple(sorted(events, key=lambda event: (event.start_s, event.rank, event.end_s)))
