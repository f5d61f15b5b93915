"""Parts of a simulated step: their predicted times, and its exchanges as messages with start and end."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby

import numpy as np

from shardscope.analytic.communication.plan import Exchange, Move, Round
from shardscope.analytic.terms import Term
from shardscope.runlog.step_events import MESSAGE, StepEvent

_BACKWARD = {"backward", "recomputation"}
_BOTH = "embedding and output"
_BUBBLE = "pipeline bubble"
_BETWEEN_STAGES = "messages between stages"
_LAUNCHES = "launches and fixed cost"
_EXPOSED = "gradients and gathered parameters"


@dataclass(frozen=True)
class StepTimes:
    """Seconds of each part of a step; they add up to the predicted step time.

    Attributes:
        data: Reading the batch.
        forward: All forward passes of the busiest rank, with its waits for launches.
        backward: All backward passes of that rank, with recomputation and waits for launches.
        bubble: Idle time that a pipeline schedule causes.
        codec: Packing and unpacking of compressed gradients.
        optimizer: The optimizer's update.
        communication: Collectives, by name; None if the prediction overlaps them with computation.
        exposed: Communication that is not overlapped, if it is known only as a whole.
        rest: Everything else, such as launches and the fixed cost of a step.
    """

    data: float = 0.0
    forward: float = 0.0
    backward: float = 0.0
    bubble: float = 0.0
    codec: float = 0.0
    optimizer: float = 0.0
    communication: Mapping[str, float] | None = field(default_factory=dict)
    exposed: float = 0.0
    rest: float = 0.0

    @classmethod
    def of(cls, time: Term) -> StepTimes:
        """Return the parts of a step time: of `job_time_term`, or of `time_term` for layouts."""
        is_layout = any(part.name == "compute" for part in time.parts)
        values = {leaf.name: leaf.value for part in time.parts for leaf in _pieces(part)}
        forward, backward = values.pop("forward", 0.0), sum(values.pop(name, 0.0) for name in _BACKWARD)
        edge = values.pop(_BOTH, 0.0) / ((forward + backward) or 1.0)
        named = next((part for part in time.parts if part.name == "communication"), None)
        collectives = {} if named is None else {part.name: part.value for part in named.parts}
        launches = 1 + edge + values.pop(_LAUNCHES, 0.0) / ((forward + backward) or 1.0)
        return cls(
            data=values.pop("data", 0.0), forward=forward * launches, backward=backward * launches,
            bubble=values.pop(_BUBBLE, 0.0), codec=values.pop("codec", 0.0), optimizer=values.pop("optimizer", 0.0),
            communication=None if is_layout else collectives,
            exposed=values.pop(_BETWEEN_STAGES, 0.0) + values.pop(_EXPOSED, 0.0),
            rest=sum(value for name, value in values.items() if name != "communication"),
        )  # fmt: skip

    @property
    def total(self) -> float:
        """The step time, in seconds."""
        computing = self.data + self.forward + self.backward + self.bubble + self.codec + self.optimizer
        return computing + self.exposed + self.rest + sum((self.communication or {}).values())


def _pieces(part: Term) -> tuple[Term, ...]:
    """Return the parts of ``compute`` and ``idle``, which the simulator places separately; else the term itself."""
    return part.parts if part.name in ("compute", "idle") else (part,)


MOST_MESSAGES = 20_000
"""Maximum number of messages of a step that are listed one by one; with more, neighbouring exchanges are merged."""
Cargo = Callable[[str], str]


def timed(exchange: Exchange, start: float, end: float, cargo: Cargo, ranks: int) -> Iterator[StepEvent]:
    """Yield the messages of an exchange between two times, and its span on each rank that takes part.

    Rounds follow one another, each with a share of the time in proportion to its longest message.
    """
    what = cargo(exchange.collective)
    if exchange.whole is not None:
        for rank in range(ranks):
            if exchange.towards is not None and exchange.towards[rank] == rank:
                continue  # not in any group of the exchange
            size = int(exchange.whole[rank])
            yield StepEvent(rank, "communication", exchange.collective, start, end, None, size, what)
        return
    weights = [max((move.num_bytes for move in each.moves), default=0) for each in exchange.rounds]
    unit = (end - start) / (sum(weights) or 1)
    members = {rank for each in exchange.rounds for move in each.moves for rank in move[:2]}
    for rank in sorted(members):
        yield StepEvent(rank, "communication", exchange.collective, start, end, item=what)
    at = start
    for each, weight in zip(exchange.rounds, weights, strict=True):
        until = at + unit * weight
        for move in each.moves:
            item = f"{move.item} of the {what}" if move.item else what
            yield StepEvent(
                move.source, MESSAGE, exchange.collective, at, until, move.target, move.num_bytes, item, each.name
            )  # fmt: skip
        at = until


def merged(exchanges: Sequence[Exchange]) -> tuple[list[Exchange], int]:
    """Return the exchanges, merged if there are too many messages, and the number of exchanges merged into one.

    Neighbouring exchanges of the same collective in the same pass become one exchange with the sums of their messages.
    """
    group = -(-sum(each.num_moves for each in exchanges) // MOST_MESSAGES)
    if group <= 1:
        return list(exchanges), 1
    fewer: list[Exchange] = []
    order = sorted(exchanges, key=_kind)
    for _, same in groupby(order, key=_kind):
        row = list(same)
        fewer += [_sum(row[first : first + group]) for first in range(0, len(row), group)]
    return fewer, group


def _kind(exchange: Exchange) -> tuple[str, str, int, bool]:
    when = exchange.when
    return when.phase, exchange.collective, when.micro_batch, exchange.whole is None


def _sum(exchanges: Sequence[Exchange]) -> Exchange:
    known = [each.whole for each in exchanges if each.whole is not None]
    if known:
        return replace(exchanges[-1], whole=np.sum(known, axis=0))
    longest = max(exchanges, key=lambda each: len(each.rounds)).rounds
    rounds = tuple(
        Round(each.name, _moves(other.rounds[k] for other in exchanges if k < len(other.rounds)))
        for k, each in enumerate(longest)
    )
    return replace(exchanges[-1], rounds=rounds)


def _moves(rounds: Iterable[Round]) -> tuple[Move, ...]:
    sizes: dict[tuple[int, int, str], int] = {}
    for move in (move for each in rounds for move in each.moves):
        key = (move.source, move.target, move.item)
        sizes[key] = sizes.get(key, 0) + move.num_bytes
    return tuple(Move(source, target, size, item) for (source, target, item), size in sizes.items())


def busiest_bytes(exchange: Exchange) -> int:
    """Return the bytes that the busiest rank sends in an exchange."""
    if exchange.whole is not None:
        return int(exchange.whole.max())
    sent: dict[int, int] = {}
    for move in (move for each in exchange.rounds for move in each.moves):
        sent[move.source] = sent.get(move.source, 0) + move.num_bytes
    return max(sent.values(), default=0)
