"""Select the k largest elements by magnitude, by partitioning all or by a threshold from a sample, with equal results.

Among elements of equal magnitude, the first are selected. Partitioning 25 million elements takes as long as copying
them many times. A stratified sample of 16,384 elements gives a threshold that more than k elements exceed, with a
margin of five standard deviations of the sampling error. One pass collects the elements above the threshold, and only
these are partitioned. If fewer than k exceed it (a chance of one in millions if elements are independent), all are
partitioned.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from shardscope.methods.compressors.topk._torch_loops import Loops
from shardscope.training.compression.randomk_draw import draw
from shardscope.training.compression.route import share_out

SAMPLE = 1 << 14
_SPREAD = 5.0
_CHUNK = 1 << 15  # up to this size torch uses one thread; on a busy machine, more would wait for each other


_PART = 1 << 18  # number of elements below which another thread is not worth starting


class Picked(NamedTuple):
    """Selected elements, and their indices in ascending order as int64."""

    indices: Tensor
    values: Tensor


def largest(values: Tensor, count: int, loops: Loops | None) -> Picked:
    """Select the `count` largest magnitudes by partitioning all elements."""
    if count == values.numel():
        return Picked(torch.arange(count), values)
    picked = _pick(values, *_threshold(values, count), count, loops)
    assert picked is not None
    return picked


def largest_by_sample(values: Tensor, count: int, seed: int, loops: Loops | None) -> Picked:
    """Select the same elements as `largest`, by a threshold from a sample that is drawn with `seed`."""
    if values.numel() < 4 * SAMPLE:  # sampling would save nothing
        return largest(values, count, loops)
    rank = _rank_in_sample(values.numel(), count)
    if rank > SAMPLE // 2:  # sampling would save nothing here either
        return largest(values, count, loops)
    threshold, _ = _threshold(values[draw(values.numel(), SAMPLE, seed)], rank)
    room = int((rank + _SPREAD * math.sqrt(rank)) * values.numel() / SAMPLE)
    picked = _pick(values, threshold, 0, room, loops)
    if picked is not None and picked.indices.numel() < count:  # many elements are equal to the threshold
        picked = _pick(values, threshold, count - picked.indices.numel(), count, loops)
    if picked is None or picked.indices.numel() < count:
        return largest(values, count, loops)
    inner = largest(picked.values, count, loops)
    return Picked(picked.indices[inner.indices], inner.values)


def _rank_in_sample(num_elements: int, count: int) -> int:
    """Return the rank of the threshold in the sample: the expected rank plus `_SPREAD` standard deviations."""
    expected = count * SAMPLE / num_elements
    return math.ceil(expected + _SPREAD * math.sqrt(expected) + 1)


def _threshold(values: Tensor, count: int) -> tuple[float, int]:
    """Return the `count`-th largest magnitude, and how many of the `count` largest magnitudes are equal to it.

    Uses NumPy's introselect, which is vectorised and takes a fraction of the time of torch's `topk`.
    """
    magnitudes = values.abs().numpy()
    magnitudes.partition(magnitudes.size - count)
    top = magnitudes[magnitudes.size - count :]
    return float(top[0]), int(np.count_nonzero(top == top[0]))


def _pick(values: Tensor, threshold: float, ties: int, room: int, loops: Loops | None) -> Picked | None:
    """Select all elements above the threshold, and the first `ties` equal to it; None if there are more than `room`."""
    if loops is None:
        indices = torch.cat(list(_chunk_indices(values, threshold, ties)))
        return Picked(indices, values[indices]) if indices.numel() <= room else None
    if not ties:
        return _pick_above(values, threshold, room, loops)
    picked = Picked(torch.empty(room, dtype=torch.int64), torch.empty(room))
    found = loops.pick(
        values.numpy(), np.float32(threshold), ties, picked.indices.numpy(), picked.values.numpy()
    )
    return Picked(picked.indices[:found], picked.values[:found]) if found <= room else None


def _pick_above(values: Tensor, threshold: float, room: int, loops: Loops) -> Picked | None:
    """Select all elements above the threshold, with one part of the values per thread; None if more than `room`."""
    parts = max(1, min(torch.get_num_threads(), values.numel() // _PART))
    indices, kept = torch.empty(parts, room, dtype=torch.int64), torch.empty(parts, room)
    counts = torch.zeros(parts, dtype=torch.int64)
    arguments = (values.numpy(), np.float32(threshold), indices.numpy(), kept.numpy(), counts.numpy())
    share_out(loops.pick_above, arguments, count=values.numel(), at_least=_PART)
    found = counts.tolist()
    if sum(found) > room:
        return None
    rows = [torch.cat([table[part, :count] for part, count in enumerate(found)]) for table in (indices, kept)]
    return Picked(*rows)


def _chunk_indices(values: Tensor, threshold: float, ties: int) -> Iterator[Tensor]:
    for i, chunk in enumerate(values.split(_CHUNK)):
        magnitudes = chunk.abs()
        taken = magnitudes > threshold
        if ties:
            equal = (magnitudes == threshold).nonzero().view(-1)[:ties]
            taken[equal] = True
            ties -= equal.numel()
        yield taken.nonzero().view(-1).add_(i * _CHUNK)
