"""Split of the rows of shards into rows for training and held-out rows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from shardscope.storage.formats import ShardFormat

_EVERY = 10
"""One in this many shards is held out; with fewer shards, one in this many rows of each shard."""


class ShardRows(NamedTuple):
    """Adjacent rows of one shard."""

    shard: int
    start: int
    stop: int

    @property
    def num_rows(self) -> int:
        """Number of rows."""
        return self.stop - self.start


def num_windows(num_tokens: int, seq: int) -> int:
    """Return the number of adjacent windows of `seq` tokens, each with the token after it."""
    return max(0, num_tokens - 1) // seq


def whole_parts(shards: ShardFormat, seq: int) -> list[ShardRows]:
    """Return all rows of each nonempty shard; a row of tokens is a window of `seq` tokens with the token after it."""
    rows = [num_windows(each.rows, seq) if shards.holds_tokens else each.rows for each in shards.shards]
    return [ShardRows(shard, 0, count) for shard, count in enumerate(rows) if count > 0]


def hold_out(parts: Sequence[ShardRows]) -> tuple[list[ShardRows], list[ShardRows]]:
    """Split shards into training and test rows: whole shards if there are enough, otherwise the last rows of each."""
    if len(parts) >= _EVERY:
        return (
            [part for place, part in enumerate(parts) if place % _EVERY != _EVERY - 1],
            [part for place, part in enumerate(parts) if place % _EVERY == _EVERY - 1],
        )
    cuts = [part.stop - max(1, part.stop // _EVERY) * (part.stop > 1) for part in parts]
    return (
        [part._replace(stop=cut) for part, cut in zip(parts, cuts, strict=True)],
        [part._replace(start=cut) for part, cut in zip(parts, cuts, strict=True)],
    )
