"""What compressed gradients weigh, to the byte: the primitives that each method's own formula is made of."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from math import prod

import numpy as np

from shardscope.analytic.communication.ring import Ints, ring_all_reduce_bytes
from shardscope.analytic.communication.sparse import index_bytes, kept_elements
from shardscope.spec.compression import Collective

FLOAT_BYTES = 4


def bits_bytes(num_elements: int, bits: int) -> int:
    """Size in bytes of `num_elements` values packed at `bits` bits each, rounded up to a whole byte."""
    return -(-num_elements * bits // 8)


def num_blocks(num_elements: int, block: int) -> int:
    """Number of blocks of `block` elements in `num_elements`; the last block may be shorter."""
    return -(-num_elements // block)


def blocks_bytes(num_elements: int, block: int, bits: int) -> int:
    """Size in bytes of block-quantized values: `bits` bits each, plus one float32 scale per block."""
    return num_blocks(num_elements, block) * FLOAT_BYTES + bits_bytes(num_elements, bits)


def kept_bytes(num_elements: int, ratio: float) -> int:
    """Bytes of the float32 values of a share `ratio` of the elements."""
    return FLOAT_BYTES * int(kept_elements(num_elements, ratio))


def placed_bytes(num_elements: int, ratio: float) -> int:
    """Bytes of the float32 values of a share `ratio` of the elements, and of their places (Lin et al. 2018)."""
    kept = int(kept_elements(num_elements, ratio))
    return FLOAT_BYTES * kept + int(index_bytes(num_elements, kept))


def share_size(num_elements: int, world_size: int, align: int) -> int:
    """Elements of each rank's share in the two-phase way: a W-th, rounded up to a multiple of `align`."""
    return -(-num_elements // (world_size * align)) * align


def collective_bytes(collective: Collective, world_size: int, *, directions: int = 1) -> Ints:
    """Bytes each rank sends in one collective, sums going around the ring; shape `(W,)`, by rank.

    Args:
        collective: Which, and of what size.
        world_size: W, the ranks.
        directions: Of the ring.
    """
    op, count, width = collective
    if op == "sum":
        return ring_all_reduce_bytes(count, width, world_size, directions=directions)
    return np.full(world_size, (world_size - 1) * count * width, dtype=np.int64)


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
    return sum(blocks_bytes(share_size(size, world_size, block), block, width) for width, size in pieces)
