"""Data source over a stream of items, such as a `torch.utils.data.IterableDataset`.

A stream has no row numbers and no length. Its items are numbered in order; after the last item, the stream restarts, so
that an epoch visits each item once, and a batch may contain the end of one epoch and the start of the next. Each rank
reads the whole stream and keeps its own items, so ranks share it without loss or duplication, however many they are.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import islice
from typing import Any

from torch import Tensor

from shardscope.errors import DataError
from shardscope.training.data.batches import Batch
from shardscope.training.data.order import ENDLESS, InOrder
from shardscope.training.data.sources import collate


class StreamSource:
    """Source that reads the items of a stream in their own order.

    Reading an earlier row than before restarts the stream, and a resumed run skips the items that were used before its
    checkpoint. Both read these items again, which takes as long as reading them the first time.

    Args:
        items: The stream. Each call of its ``__iter__`` must yield the same items; if it has a method ``set_epoch``, as
            streams that shuffle do, it is called with the number of the epoch first. It must not divide itself among
            ranks.
    """

    def __init__(self, items: Iterable[Any]) -> None:
        self._items = items
        self._at, self._iterator = 0, self._endless()

    def __len__(self) -> int:
        return ENDLESS

    def order(self, _seed: int) -> InOrder:
        """Return the order of the rows, which is the order of the stream."""
        return InOrder()

    def batch(self, indices: Tensor) -> Batch:
        """Return the items with these numbers, which must increase, stacked into a batch.

        Raises:
            DataError: The stream is empty, or its items cannot be stacked.
        """
        wanted = indices.tolist()
        if wanted and wanted[0] < self._at:
            self._at, self._iterator = 0, self._endless()
        return collate([self._item(number) for number in wanted])

    def _item(self, number: int) -> Any:
        skipped = number - self._at
        assert skipped >= 0, f"item {number} is read after item {self._at - 1}"
        self._at = number + 1
        return next(islice(self._iterator, skipped, None))

    def _endless(self) -> Iterator[Any]:
        """Yield the items of all epochs."""
        for epoch in range(ENDLESS):
            if hasattr(self._items, "set_epoch"):
                self._items.set_epoch(epoch)
            is_empty = True
            for item in self._items:
                is_empty = False
                yield item
            if is_empty:
                raise DataError(
                    f"data returned a stream ({type(self._items).__name__}) without items in epoch {epoch}; yield the "
                    "same items each time that it is iterated over"
                )
