"""Traffic and messages of one axis of a mesh of ranks, placed on all ranks of the job.

A strategy on one axis describes what ranks 0 to N-1 of a group along this axis send. All groups along an axis do the
same at the same time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

import numpy as np

from shardscope.analytic.communication.plan import Exchange, in_groups
from shardscope.analytic.communication.ring import Ints
from shardscope.analytic.communication.traffic import Sent, Traffic
from shardscope.runlog.axes import axis_groups, on_axis


def groups_along(shape: Mapping[str, int], axis: str) -> Ints:
    """Return the groups of ranks along an axis, as an array with one row for each group; see `axis_groups`."""
    return np.array(axis_groups(shape, axis))


def placed(column: Ints, groups: Ints) -> Ints:
    """Return the values of all ranks, given those of the ranks of one group, or one value for all of them."""
    found = np.empty(groups.size, dtype=np.asarray(column).dtype)
    found[groups] = column
    return found


def axis_traffic(traffic: Traffic, axis: str, groups: Ints) -> Traffic:
    """Return the traffic of all ranks along an axis, given that of one group, under names with the axis."""
    found = {}
    for name, sent in traffic.items():
        others = np.full_like(sent.bytes, groups.shape[1] - 1)
        known = sent if sent.assumed_messages is not None else sent._replace(assumed_messages=others)
        found[on_axis(axis, name)] = known.each(lambda column: placed(column, groups))
    return found


def side_by_side(blocks: Sequence[Traffic]) -> dict[str, Sent]:
    """Return the traffic of all ranks, given that of blocks of ranks in order; a block may lack some collectives."""
    sizes = [max((len(sent.bytes) for sent in block.values()), default=0) for block in blocks]
    size = max(sizes)
    names = dict.fromkeys(name for block in blocks for name in block)
    none = Sent(np.zeros(size, dtype=np.int64), np.zeros(size, dtype=np.int64))
    return {name: _concatenated([block.get(name, none) for block in blocks]) for name in names}


def _concatenated(parts: Sequence[Sent]) -> Sent:
    """Return one collective's traffic on all ranks, given that on each block of ranks."""

    def column(of: Callable[[Sent], Ints | None], otherwise: Callable[[Sent], Ints]) -> Ints | None:
        found = [of(part) for part in parts]
        if all(each is None for each in found):
            return None
        return np.concatenate(
            [otherwise(part) if each is None else each for each, part in zip(found, parts, strict=True)]
        )

    def counted(part: Sent) -> Ints:
        return np.full_like(part.bytes, len(part.bytes) - 1)

    def bound(at: int) -> Ints | None:
        return column(lambda part: None if part.bounds is None else part.bounds[at], lambda part: part.bytes)

    low, high = bound(0), bound(1)
    return Sent(
        np.concatenate([part.bytes for part in parts]), np.concatenate([part.messages for part in parts]),
        None if low is None or high is None else (low, high),
        column(lambda part: part.received, lambda part: part.bytes),
        column(lambda part: part.awaited, lambda part: part.bytes),
        column(lambda part: part.assumed_messages, counted),
    )  # fmt: skip


def axis_exchanges(exchanges: Iterable[Exchange], axis: str, groups: Ints) -> Iterator[Exchange]:
    """Yield the exchanges of all groups along an axis, given those of one group."""
    members = [tuple(group) for group in groups.tolist()]
    to_next = np.roll(np.arange(groups.shape[1]), -1)
    for each in exchanges:
        towards = np.empty(groups.size, dtype=np.int64)
        towards[groups] = groups[:, to_next if each.towards is None else each.towards]
        yield replace(
            each, collective=on_axis(axis, each.collective), rounds=in_groups(each.rounds, members),
            whole=None if each.whole is None else placed(each.whole, groups), towards=towards,
        )  # fmt: skip
