"""Bytes on the wire of the ring, by formula.

The exact forms count the elements of uneven chunks, so that they can be held against a measurement to the byte. With
chunks of equal size they become the textbook's 2(W-1)/W S a rank (Patarasuk and Yuan 2009; Thakur et al. 2005).
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]
RING_PASSES = {"all_reduce": 2, "reduce_scatter": 1, "all_gather": 1, "all_to_all": 1}
"""How often every byte but a rank's own share goes by."""


def even_share_bytes(num_bytes: npt.ArrayLike, workers: npt.ArrayLike) -> Floats:
    """Bytes that each of W ranks sends in a reduce-scatter or all-gather with equal chunks: (W-1)/W S. Broadcasts."""
    size, count = np.asarray(num_bytes, dtype=np.float64), np.asarray(workers, dtype=np.float64)
    share: Floats = size * ((count - 1) / count)
    return share


def chunk_sizes(num_elements: int, world_size: int) -> Ints:
    """Elements in each of `world_size` nearly equal chunks, the first ones taking the remainder; shape `(W,)`."""
    base, rest = divmod(num_elements, world_size)
    return base + (np.arange(world_size) < rest).astype(np.int64)


def ring_reduce_scatter_bytes(num_elements: int, element_bytes: int, world_size: int) -> Ints:
    """Bytes that each rank sends in a ring reduce-scatter: all chunks but its own; shape `(W,)`, by rank."""
    return (num_elements - chunk_sizes(num_elements, world_size)) * element_bytes


def ring_all_gather_bytes(num_elements: int, element_bytes: int, world_size: int) -> Ints:
    """Bytes that each rank sends in a ring all-gather: all chunks but its successor's; shape `(W,)`, by rank."""
    return (num_elements - np.roll(chunk_sizes(num_elements, world_size), -1)) * element_bytes


def ring_all_reduce_bytes(
    num_elements: int, element_bytes: int, world_size: int, *, directions: int = 1
) -> Ints:
    """Bytes that each rank sends in a ring all-reduce; shape `(W,)`, by rank. The sum is 2(W-1) S, exactly.

    Args:
        num_elements: Elements of the tensor.
        element_bytes: Bytes of one element.
        world_size: Ranks in the ring.
        directions: 2 sends the first half (rounded up) clockwise and the rest the other way around.
    """
    if world_size == 1:
        return np.zeros(1, dtype=np.int64)
    if directions == 1:
        scatter = ring_reduce_scatter_bytes(num_elements, element_bytes, world_size)
        return scatter + ring_all_gather_bytes(num_elements, element_bytes, world_size)
    first = (num_elements + 1) // 2
    clockwise = ring_all_reduce_bytes(first, element_bytes, world_size)
    rest = chunk_sizes(num_elements - first, world_size)
    # the other way around, a rank gathers all chunks but its predecessor's
    counter = 2 * rest.sum() - rest - np.roll(rest, 1)
    sent: Ints = clockwise + counter * element_bytes
    return sent
