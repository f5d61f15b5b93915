"""Uneven division among ranks: of a batch by given shares or measured speed, and of tensors by shares or memory."""

from __future__ import annotations

import heapq
import re
from collections.abc import Callable, Sequence
from itertools import accumulate, pairwise
from math import gcd
from typing import Any

from shardscope.errors import SpecError, quoted
from shardscope.spec.units import bytes_text, plural

MEASURED = "measured"
"""Value of `Batch.shares` that divides the batch by measured speed."""
BY_MEMORY = "memory"
"""Value of `Zero1.shards` and `Zero2.shards` that divides sharded state by the memory of the ranks."""
_LISTED = re.compile(r"[\s(\[]*(\d{1,9}(?:\s*,\s*\d{1,9})*)[\s,)\]]*")


def reader_of_shares(field: str, word: str) -> Callable[[Any], Any]:
    """Return a validator for a field that accepts one share for each rank (as numbers or text), a keyword, or None.

    Args:
        field: Name of the field, for error messages.
        word: The accepted keyword, such as ``measured``.
    """

    def read(value: Any) -> Any:
        if isinstance(value, str) and (found := _LISTED.fullmatch(value)):  # as on a command line
            value = tuple(map(int, found[1].split(",")))
        is_list = (
            isinstance(value, list | tuple)
            and value
            and all(type(each) is int and each >= 1 for each in value)
        )
        if value is not None and value != word and not is_list:
            raise SpecError(
                f"{field}={quoted(value)} is not valid; give one whole number of at least 1 for each rank, such as "
                f"(2, 2, 1, 1), or {word!r}"
            )
        return value

    return read


def shard_sizes(num_elements: int, shares: Sequence[int]) -> list[int]:
    """Return the sizes of consecutive chunks of a tensor, one for each rank, in proportion to `shares`.

    Chunk boundaries are rounded down, so each size is within one element of its exact share.

    Example:
        >>> shard_sizes(100, (2, 2, 1, 1))
        [33, 33, 17, 17]
    """
    total, ends = sum(shares), accumulate(shares)
    return [b - a for a, b in pairwise([0, *(num_elements * end // total for end in ends)])]


def shares_by_memory(memory_bytes: Sequence[float], whole_bytes: float) -> tuple[int, ...]:
    """Return shares in proportion to the memory that is free on each rank after unsharded tensors are allocated.

    Args:
        memory_bytes: Memory of each rank.
        whole_bytes: Bytes of unsharded tensors on every rank: weights and gradient buckets.

    Raises:
        SpecError: A rank has no free memory.

    Example:
        >>> shares_by_memory([5e9, 5e9, 3e9], 1e9)
        (4000000000, 4000000000, 2000000000)
    """
    left = tuple(int(each - whole_bytes) for each in memory_bytes)
    if min(left) < 1:
        rank = left.index(min(left))
        raise SpecError(
            f"strategy.shards={BY_MEMORY!r} leaves no memory for a shard on rank {rank}, whose memory of "
            f"{bytes_text(memory_bytes[rank])} does not exceed the {bytes_text(whole_bytes)} of weights and gradient "
            "buckets that each rank holds; use a smaller model, or strategy='zero-3'"
        )
    return left


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
            f"{told} has {plural(len(shares), 'number')}, but the batch is divided among "
            f"{plural(num_ranks, 'rank')}; give {num_ranks}"
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
    """Return the number of samples for each rank with which the last rank finishes as early as possible.

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
