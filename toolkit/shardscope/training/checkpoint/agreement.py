"""Operations that all ranks perform together while they save or load a checkpoint."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch.distributed as dist

from shardscope.training.context import RankContext

Item = TypeVar("Item")
Failure = tuple[int | None, str]
"""Number and text of an `OSError`."""


def gather_items(context: RankContext, mine: Item) -> list[Item]:
    """Gather one item from each rank, in rank order."""
    every = [mine] * context.world_size
    if context.group is not None:
        dist.all_gather_object(every, mine)
    return every


def on_every_rank(context: RankContext, work: Callable[[], Item]) -> list[Item]:
    """Run `work` on every rank, and return the results of all ranks in rank order.

    Raises:
        OSError: `work` raised this error on some rank; all ranks raise it.
    """
    mine: tuple[Item | None, Failure | None]
    try:
        mine = (work(), None)
    except OSError as error:
        mine = (None, failure_of(error))
    every = gather_items(context, mine)
    for _, failed in every:
        if failed is not None:
            raise OSError(*failed)
    return [result for result, _ in every]  # type: ignore[misc]  # None only where `work` returned None


def failure_of(error: OSError) -> Failure:
    """Return the number and the text of an error, which other ranks need to raise it too."""
    return error.errno, error.strerror or str(error)
