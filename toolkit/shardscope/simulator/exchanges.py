"""Exchanges in time: messages with start and end, and how many exchanges are drawn."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import groupby

import numpy as np

from shardscope.analytic.communication.plan import Exchange, Move, Round
from shardscope.runlog.step_events import MESSAGE, StepEvent

MOST_MESSAGES = 20_000
"""Largest number of messages of a step that are listed one by one; beyond it, neighbouring exchanges are merged."""
Cargo = Callable[[str], str]


def timed(exchange: Exchange, start: float, end: float, cargo: Cargo, ranks: int) -> Iterator[StepEvent]:
    """Yield the messages of an exchange between two times, and its span on each rank that takes part.

    Rounds follow one another, each with a share of the time in proportion to its longest message.
    """
    what = cargo(exchange.collective)
    if exchange.whole is not None:
        for rank in range(ranks):
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
    """Return fewer exchanges if there are too many messages, and how many are drawn as one.

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
