"""Data sources over shards on disk: parts of shards, whose rows are read in a two-level random order.

Training rows and held-out rows are different parts of the same shards. Both splits share one `ShardReader`, which keeps
the shards open.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from shardscope.errors import DataError
from shardscope.spec.shards import Shards
from shardscope.storage.formats import Array, open_shards
from shardscope.storage.parts import ShardRows, hold_out, whole_parts
from shardscope.storage.reader import ShardReader
from shardscope.training.data.batches import Batch
from shardscope.training.data.order import WindowShuffle
from shardscope.training.data.sources import ArraySource, Dataset, DataSource, WindowSource


class ShardSource:
    """Source that reads rows of shards, which may be larger than memory.

    Args:
        reader: Opens the shards.
        parts: The rows of this source.
        seq: Tokens per row, for shards of tokens.
        vocab: The model's vocabulary size; reading a token outside it raises an error. None accepts all tokens.
    """

    def __init__(
        self, reader: ShardReader, parts: Sequence[ShardRows], *, seq: int, vocab: int | None
    ) -> None:
        self.reader, self.parts, self._seq, self._vocab = reader, parts, seq, vocab
        self._lengths = [part.num_rows for part in parts]
        self._firsts = np.concatenate([[0], np.cumsum(self._lengths)])

    def __len__(self) -> int:
        return int(self._firsts[-1])

    @property
    def is_text(self) -> bool:
        """Whether rows are adjacent windows of a text."""
        return self.reader.shards.holds_tokens

    @property
    def prefetch(self) -> int:
        """Number of steps to read ahead."""
        return self.reader.spec.prefetch

    def order(self, seed: int) -> WindowShuffle:
        """Return the order in which epochs visit the rows."""
        return WindowShuffle(self._lengths, self.reader.spec.window, seed)

    def batch(self, indices: Tensor) -> Batch:
        """Return the inputs and targets of the rows at `indices`."""
        rows = indices.numpy()
        places = np.searchsorted(self._firsts, rows, side="right") - 1
        counts = {
            int(place): int(count)
            for place, count in zip(*np.unique(places, return_counts=True), strict=True)
        }
        opened = self.reader.rows({self.parts[place].shard: count for place, count in counts.items()})
        found, order = [], []
        for place in counts:
            part, (chosen,) = self.parts[place], np.nonzero(places == place)
            within = torch.from_numpy(rows[chosen] - self._firsts[place] + part.start)
            found.append(self._source(opened[part.shard]).batch(within))
            order.append(chosen)
        back = torch.from_numpy(np.argsort(np.concatenate(order)))
        inputs, targets = (torch.cat([batch[side] for batch in found])[back] for side in (0, 1))
        return inputs, targets

    def announce(self, order: WindowShuffle, place: tuple[int, int], count: int, *, turn: float) -> None:
        """Start opening the shards of the next `count` rows, and prefetch those of the window after them.

        Args:
            order: The order in which rows are read.
            place: Epoch and position of the first row.
            count: Number of rows.
            turn: Fraction of a window's shards, from 0 to 1, after which this rank begins. Ranks begin with different
                shards, so that together they fetch each shard once.
        """
        epoch, start = place
        now = order.windows(epoch, start, start + count)
        for window in (*now, order.after(now[-1])):
            shards = [self.parts[each].shard for each in window.shards]
            first = int(turn * len(shards))
            self.reader.announce(
                window.epoch, window.number, shards[first:] + shards[:first], is_next=window not in now
            )

    def _source(self, rows: Array) -> DataSource:
        if rows.dtype.names is None:
            return WindowSource(rows, self._seq, self._vocab)
        x, y = (rows[name] for name in self.reader.shards.fields)
        inputs, targets = self.reader.shards.columns
        if inputs == targets:
            x, y = x[:, :-1], y[:, 1:]
        return ArraySource(x, y)


def read_shards(spec: Shards, *, seq: int, vocab: int | None = None) -> Dataset:
    """Open shards for training and testing (see `Shards`).

    Args:
        spec: The shards.
        seq: Tokens per row, for shards of tokens.
        vocab: The model's vocabulary size; reading a token outside it raises an error. None accepts all tokens.

    Raises:
        DataError: The shards are missing or damaged, hold too few rows, or cannot be cached.
    """
    shards = open_shards(spec)
    whole = whole_parts(shards, seq)
    train, test = (whole, []) if spec.test is not None else hold_out(whole)
    reader = ShardReader(shards, spec)

    def source(opened: ShardReader, parts: Sequence[ShardRows]) -> ShardSource:
        kept = [part for part in parts if part.num_rows > 0]
        if not kept:
            raise DataError(
                f"data={spec.path!r} has {sum(part.num_rows for part in whole)} rows, which are too few to train and "
                f"test on; give more rows, or for tokens shards with more than seq={seq} tokens"
            )
        return ShardSource(opened, kept, seq=seq, vocab=vocab)

    if spec.test is not None:
        others = open_shards(spec, path=spec.test)
        return Dataset(
            train=source(reader, train), test=source(ShardReader(others, spec), whole_parts(others, seq))
        )
    return Dataset(train=source(reader, train), test=source(reader, test))
