"""Compressed gradients that really run: exact bytes of every packet, and of what each rank sends.

`packet_bytes` is what one rank's values weigh once packed; `compressed_bytes` is what the ranks send so that all end
with the mean of a bucket. Both are for runs to be held against, to the byte.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod

import numpy as np

from shardscope.analytic.communication.ring import Ints, ring_all_reduce_bytes
from shardscope.errors import SpecError
from shardscope.spec.compression import Compression

_SCALE_BYTES = 4


def _blocks(num_elements: int, block: int) -> int:
    return -(-num_elements // block)


def _block_int(bits: int) -> Callable[[Compression, int], int]:
    """Dettmers et al. 2022: a float32 scale a block, and so many bits an element."""

    def count(compression: Compression, num_elements: int) -> int:
        scales = _blocks(num_elements, compression.settings["block"]) * _SCALE_BYTES
        return scales + -(-num_elements * bits // 8)

    return count


PACKET_BYTES: dict[str, Callable[[Compression, int], int]] = {
    "fp16": lambda _, num_elements: 2 * num_elements,
    "bf16": lambda _, num_elements: 2 * num_elements,
    "int8": _block_int(8),
    "int4": _block_int(4),
}
"""Bytes of a packet of so many elements, by method, for those that pack values."""
SUMMED: dict[str, int] = {"fp16": 2, "bf16": 2}
"""Methods whose packets are added up on the way, with the bytes of what is added."""


def packet_bytes(compression: Compression, num_elements: int) -> int:
    """Bytes of one packet of `num_elements` values.

    Raises:
        SpecError: The method packs no values by themselves.
    """
    if compression.name not in PACKET_BYTES:
        raise SpecError(
            f"compression={compression.name!r} has no packets of single values; take one of {', '.join(PACKET_BYTES)}"
        )
    return PACKET_BYTES[compression.name](compression, num_elements)


def share_size(num_elements: int, world_size: int, align: int) -> int:
    """Elements of each rank's share in the two-phase way: a W-th, rounded up to whole blocks."""
    return -(-num_elements // (world_size * align)) * align


def compressed_bytes(
    compression: Compression, shapes: Sequence[tuple[int, ...]], world_size: int, *, directions: int = 1
) -> Ints:
    """Bytes that each rank sends so that all end with the mean of one bucket; shape `(W,)`, by rank.

    Args:
        compression: The method with its settings.
        shapes: Of the tensors in the bucket, in their order.
        world_size: W, the ranks.
        directions: Of the ring that adds up what can be added up.
    """
    num_elements = sum(prod(shape) for shape in shapes)
    if compression.name in SUMMED:
        width = SUMMED[compression.name]
        count = packet_bytes(compression, num_elements) // width
        return ring_all_reduce_bytes(count, width, world_size, directions=directions)
    if compression.settings.get("exchange") == "gather":
        each = (world_size - 1) * packet_bytes(compression, num_elements)
    else:
        share = share_size(num_elements, world_size, compression.settings.get("block", 1))
        each = 2 * (world_size - 1) * packet_bytes(compression, share)
    return np.full(world_size, each, dtype=np.int64)


def scattered_bytes(compression: Compression, share: int, world_size: int) -> Ints:
    """Bytes that each rank sends so that each ends with its own share of the mean, of `share` elements; by rank."""
    sent: Ints = np.full(world_size, (world_size - 1) * packet_bytes(compression, share), dtype=np.int64)
    return sent
