"""Uneven division of a global batch among ranks: by given shares, or by measured speed."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from math import gcd

from shardscope.errors import SpecError

MEASURED = "measured"
"""Value of `Batch.shares` that divides the batch by measured speed."""


def samples_by_share(global_batch: int, shares: Sequence[int], num_ranks: int) -> tuple[int, ...]:
    """Return the number of samples of each rank, in proportion to `shares`.

    Example:
        >>> samples_by_share(96, (2, 2, 1, 1), 4)
        (32, 32, 16, 16)

    Raises:
        SpecError: There is not one share for each rank, or the batch cannot be divided in these proportions.
    """
    told = f"batch.shares={tuple(shares)}"
    if len(shares) != num_ranks:
        raise SpecError(
            f"{told} has {len(shares)} number{'s' * (len(shares) != 1)}, but the batch is divided among {num_ranks} "
            f"rank{'s' * (num_ranks != 1)}; give {num_ranks}"
        )
    each = gcd(*shares)
    parts = sum(shares) // each
    size, rest = divmod(global_batch, parts)
    if rest or not size:
        near = f"{size * parts} or {(size + 1) * parts}" if size else f"{parts}"
        raise SpecError(
            f"batch.global_batch={global_batch} cannot be divided by {told}; use a multiple of {parts}, such as {near}"
        )
    return tuple(share // each * size for share in shares)


def samples_by_speed(global_batch: int, speeds: Sequence[float], unit: int = 1) -> tuple[int, ...]:
    """Return the number of samples of each rank with which the slowest rank finishes as early as possible.

    A rank gets whole units, at least one, and takes units / speed. Handing out one unit after another, always to the
    rank that would finish it first, minimises the largest time (list scheduling of equal tasks on uniform machines;
    Graham et al. 1979, section 4).

    Args:
        global_batch: Number of samples, a multiple of `unit`, with at least one unit for each rank.
        speeds: Samples per second of each rank, all positive.
        unit: Samples that are processed together, such as a micro-batch.

    Example:
        >>> samples_by_speed(56, (2, 2, 2, 1), unit=8)
        (16, 16, 16, 8)
    """
    units, rest = divmod(global_batch, unit)
    assert not rest, f"a batch of {global_batch} has no whole number of units of {unit}"
    assert units >= len(speeds), f"{units} units are too few for {len(speeds)} ranks"
    counts = [1] * len(speeds)
    queue = [(2 / speed, rank) for rank, speed in enumerate(speeds)]
    heapq.heapify(queue)
    for _ in range(units - len(speeds)):
        _, rank = queue[0]
        counts[rank] += 1
        heapq.heapreplace(queue, ((counts[rank] + 1) / speeds[rank], rank))
    return tuple(count * unit for count in counts)
