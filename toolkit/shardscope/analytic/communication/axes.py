"""Traffic and messages of one axis of a mesh of ranks, placed on all ranks of the job.

A strategy on one axis describes what ranks 0 to N-1 of a group along this axis send. All groups along an axis do the
same at the same time.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace

import numpy as np

from shardscope.analytic.communication.plan import Exchange, in_groups
from shardscope.analytic.communication.ring import Ints
from shardscope.analytic.communication.traffic import Traffic
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
    others = groups.shape[1] - 1
    return {
        on_axis(axis, name): sent.each(lambda column: placed(column, groups))._replace(
            unlisted=others if sent.unlisted is None else sent.unlisted
        )
        for name, sent in traffic.items()
    }


def axis_exchanges(exchanges: Iterable[Exchange], axis: str, groups: Ints) -> Iterator[Exchange]:
    """Yield the exchanges of all groups along an axis, given those of one group."""
    members = [tuple(group) for group in groups.tolist()]
    towards = np.empty(groups.size, dtype=np.int64)
    towards[groups] = np.roll(groups, -1, axis=1)  # to the next rank of the same group
    for each in exchanges:
        yield replace(
            each, collective=on_axis(axis, each.collective), rounds=in_groups(each.rounds, members),
            whole=None if each.whole is None else placed(each.whole, groups), towards=towards,
        )  # fmt: skip
