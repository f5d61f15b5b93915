"""Select the k elements of largest magnitude, in one of two ways that give the same result.

`largest` partitions all elements. For 25 million elements, this takes many times as long as copying them, so
`largest_by_sample` first draws a stratified sample of 16,384 elements. The sample determines a threshold that is low
enough for more than k elements to exceed it, with a margin of five standard deviations of the sampling error. One pass
collects the elements above the threshold, and only these are partitioned. If fewer than k elements exceed the threshold
(a chance of one in millions if elements are independent), all elements are partitioned. Among elements of equal
magnitude, both functions select those with the lowest indices.
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
_CHUNK = 1 << 15  # torch uses one thread up to this size; on a busy machine, threads wait for each other


_PART = 1 << 18  # number of elements below which another thread is not worth starting


class Picked(NamedTuple):
    """Selected elements, and their indices in ascending order as int64."""

    indices: Tensor
    values: Tensor


def largest(values: Tensor, count: int, loops: Loops | None) -> Picked:
    """Select the `count` elements of largest magnitude by partitioning all elements."""
    if count == values.numel():
        return Picked(torch.arange(count), values)
    picked = _pick(values, *_threshold(values, count), count, loops)
    assert picked is not None
    return picked


def largest_by_sample(values: Tensor, count: int, seed: int, loops: Loops | None) -> Picked:
    """Select the same elements as `largest`, with a threshold from a sample that is drawn with `seed`."""
    if values.numel() < 4 * SAMPLE:  # sampling would save nothing
        return largest(values, count, loops)
    rank = _rank_in_sample(values.numel(), count)
    if rank > SAMPLE // 2:  # sampling would save nothing here either
        return largest(values, count, loops)
    threshold, _ = _threshold(values[draw(values.numel(), SAMPLE, seed)], rank)
    capacity = int((rank + _SPREAD * math.sqrt(rank)) * values.numel() / SAMPLE)
    picked = _pick(values, threshold, 0, capacity, loops)
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

    The elements are partitioned by NumPy's introselect, which is vectorised and much faster than torch's `topk`.
    """
    magnitudes = values.abs().numpy()
    magnitudes.partition(magnitudes.size - count)
    top = magnitudes[magnitudes.size - count :]
    return float(top[0]), int(np.count_nonzero(top == top[0]))


def _pick(values: Tensor, threshold: float, ties: int, capacity: int, loops: Loops | None) -> Picked | None:
    """Select all elements above the threshold, and the first `ties` equal to it; None if they exceed `capacity`."""
    if loops is None:
        indices = torch.cat(list(_chunk_indices(values, threshold, ties)))
        return Picked(indices, values[indices]) if indices.numel() <= capacity else None
    if not ties:
        return _pick_above(values, threshold, capacity, loops)
    picked = Picked(torch.empty(capacity, dtype=torch.int64), torch.empty(capacity))
    found = loops.pick(
        values.numpy(), np.float32(threshold), ties, picked.indices.numpy(), picked.values.numpy()
    )
    return Picked(picked.indices[:found], picked.values[:found]) if found <= capacity else None


def _pick_above(values: Tensor, threshold: float, capacity: int, loops: Loops) -> Picked | None:
    """Select all elements above the threshold, in several threads; return None if they exceed `capacity`."""
    parts = max(1, min(torch.get_num_threads(), values.numel() // _PART))
    indices, kept = torch.empty(parts, capacity, dtype=torch.int64), torch.empty(parts, capacity)
    counts = torch.zeros(parts, dtype=torch.int64)
    arguments = (values.numpy(), np.float32(threshold), indices.numpy(), kept.numpy(), counts.numpy())
    share_out(loops.pick_above, arguments, count=values.numel(), at_least=_PART)
    found = counts.tolist()
    if sum(found) > capacity:
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
