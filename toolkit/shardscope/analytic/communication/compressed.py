"""Compressed gradients that really run: exact bytes of every packet, and of what each rank sends.

`packet_bytes` is what one rank's values weigh once packed; `compressed_bytes` is what the ranks send so that all end
with the mean of a bucket. Both are for runs to be held against, to the byte.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import groupby
from math import floor, prod

import numpy as np

from shardscope.analytic.communication.ring import Ints, ring_all_reduce_bytes
from shardscope.analytic.communication.sparse import index_bytes, kept_elements
from shardscope.errors import SpecError
from shardscope.spec.compression import PROBES, Compression

_SCALE_BYTES = 4
_FLOAT_BYTES = 4


def _blocks(num_elements: int, block: int) -> int:
    return -(-num_elements // block)


def _in_blocks(bits: int | None = None) -> Callable[[Compression, int], int]:
    """A float32 scale a block, and so many bits an element (the method's own setting if None)."""

    def count(compression: Compression, num_elements: int) -> int:
        settings = compression.settings
        width = settings["bits"] if bits is None else bits
        return _blocks(num_elements, settings["block"]) * _SCALE_BYTES + _packed(num_elements, width)

    return count


def _packed(num_elements: int, bits: int) -> int:
    return -(-num_elements * bits // 8)


def _random_k(compression: Compression, num_elements: int) -> int:
    """Stich et al. 2018: float32 values; all ranks know which."""
    return _FLOAT_BYTES * int(kept_elements(num_elements, compression.settings["ratio"]))


def _random_block(compression: Compression, num_elements: int) -> int:
    block: int = compression.settings["block"]
    kept = int(kept_elements(_blocks(num_elements, block), compression.settings["ratio"]))
    return _FLOAT_BYTES * min(num_elements, kept * block)


def _top_k(compression: Compression, num_elements: int) -> int:
    """Lin et al. 2018: float32 values and their places."""
    kept = int(kept_elements(num_elements, compression.settings["ratio"]))
    return _FLOAT_BYTES * kept + int(index_bytes(num_elements, kept))


PACKET_BYTES: dict[str, Callable[[Compression, int], int]] = {
    "fp16": lambda _, num_elements: 2 * num_elements,
    "bf16": lambda _, num_elements: 2 * num_elements,
    "fp8": _in_blocks(8),  # Micikevicius et al. 2022
    "int8": _in_blocks(8),  # Dettmers et al. 2022
    "int4": _in_blocks(4),
    "qsgd": _in_blocks(),  # Alistarh et al. 2017, without their entropy coding
    "terngrad": lambda _, num_elements: _SCALE_BYTES + _packed(num_elements, 2),  # Wen et al. 2017
    "natural": lambda _, num_elements: num_elements + _packed(num_elements, 1),  # Horvath et al. 2019
    "sign": _in_blocks(1),  # Karimireddy et al. 2019
    "sign-vote": lambda _, num_elements: _packed(num_elements, 1),  # Bernstein et al. 2018
    "onebit-adam": _in_blocks(1),  # Tang et al. 2021
    "onebit-lamb": _in_blocks(1),  # Li et al. 2021
    "randomk": _random_k,
    "randomblock": _random_block,
    "topk": _top_k,
    "dgc": _top_k,
}
"""Bytes of a packet of so many elements, by method, for those that pack values."""
SUMMED: dict[str, int] = {"fp16": 2, "bf16": 2, "randomk": 4, "randomblock": 4}
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


def low_rank_elements(
    shapes: Sequence[tuple[int, ...]], ranks: Sequence[int], *, probes: int = 0
) -> tuple[int, int]:
    """Float32 elements in the two messages by which PowerSGD brings one bucket (Vogels et al. 2019, algorithm 1).

    A tensor of two dimensions or more is a matrix of its first dimension by all others, m x n. Its left factor has
    r m elements, in the first message, its right one r n, in the second. Where r (m + n) is no less than m n, it goes
    as it is with the first message, as do tensors of one dimension.

    Args:
        shapes: Of the tensors in the bucket.
        ranks: Of each tensor's approximation, r; 0 to send it as it is.
        probes: Vectors of m elements each that go with every left factor.
    """
    first = second = 0
    for shape, rank in zip(shapes, ranks, strict=True):
        rows, columns = (shape[0], prod(shape[1:])) if len(shape) > 1 else (1, prod(shape))
        pays = 0 < rank * (rows + columns) < rows * columns
        first += (rank + probes) * rows if pays else rows * columns
        second += rank * columns if pays else 0
    return first, second


def mixed_packet_bytes(
    shapes: Sequence[tuple[int, ...]], bits: Sequence[int], block: int, world_size: int
) -> int:
    """Bytes of one rank's share of a bucket whose tensors are integers of different bits, packed.

    Neighbours of the same bits are one piece, and each rank has a share of every piece.
    """
    sizes = zip(bits, (prod(shape) for shape in shapes), strict=True)
    pieces = [
        (width, sum(size for _, size in run)) for width, run in groupby(sizes, key=lambda pair: pair[0])
    ]
    shares = [(width, share_size(size, world_size, block)) for width, size in pieces]
    return sum(_blocks(share, block) * _SCALE_BYTES + -(-share * width // 8) for width, share in shares)


def _summed(messages: Sequence[int], world_size: int, directions: int) -> Ints:
    """Bytes by rank of so many float32 each, added up one message after the other."""
    sent: Ints = np.zeros(world_size, dtype=np.int64)
    for count in messages:
        sent = sent + ring_all_reduce_bytes(count, _FLOAT_BYTES, world_size, directions=directions)
    return sent


def compressed_bytes(
    compression: Compression,
    shapes: Sequence[tuple[int, ...]],
    world_size: int,
    *,
    directions: int = 1,
    plan: Sequence[int] | None = None,
) -> Ints:
    """Bytes that each rank sends so that all end with the mean of one bucket; shape `(W,)`, by rank.

    Args:
        compression: The method with its settings; where they move, as they are `Compression.at_step`.
        shapes: Of the tensors in the bucket, in their order.
        world_size: W, the ranks.
        directions: Of the ring that adds up what can be added up.
        plan: Of an adaptive method: each tensor's bits or rank in force. None before bits have moved, and in steps in
            which adaptive-rank looks at the gradient, at its largest rank.
    """
    if compression.name in ("powersgd", "adaptive-rank"):
        looks = compression.name == "adaptive-rank" and plan is None
        ranks = [compression.settings["rank"]] * len(shapes) if plan is None else plan
        messages = low_rank_elements(shapes, ranks, probes=PROBES if looks else 0)
        return _summed(messages, world_size, directions)
    if compression.name == "adaptive-bits":
        bits = [floor(compression.settings["budget"])] * len(shapes) if plan is None else plan
        packet = mixed_packet_bytes(shapes, bits, compression.settings["block"], world_size)
        return np.full(world_size, 2 * (world_size - 1) * packet, dtype=np.int64)
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
