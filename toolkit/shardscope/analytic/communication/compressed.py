"""Exact size of compressed gradients in bytes: the primitives from which each method builds its formula."""

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
    """Bytes of the float32 values if a fraction `ratio` of the elements is kept."""
    return FLOAT_BYTES * int(kept_elements(num_elements, ratio))


def placed_bytes(num_elements: int, ratio: float) -> int:
    """Bytes of the float32 values and their indices if a fraction `ratio` of the elements is kept (Lin et al. 2018)."""
    kept = int(kept_elements(num_elements, ratio))
    return FLOAT_BYTES * kept + int(index_bytes(num_elements, kept))


def share_size(num_elements: int, world_size: int, align: int) -> int:
    """Elements of each rank's share in a two-phase exchange: 1/W of all, rounded up to a multiple of `align`."""
    return -(-num_elements // (world_size * align)) * align


def collective_bytes(collective: Collective, world_size: int, *, directions: int = 1) -> Ints:
    """Bytes that each rank sends in one collective, if sums use the ring; shape `(W,)`, by rank.

    Args:
        collective: The collective and its size.
        world_size: W, the number of ranks.
        directions: Number of directions in which the ring sends, 1 or 2.
    """
    op, count, width = collective
    if op == "sum":
        return ring_all_reduce_bytes(count, width, world_size, directions=directions)
    return np.full(world_size, (world_size - 1) * count * width, dtype=np.int64)


def low_rank_elements(
    shapes: Sequence[tuple[int, ...]], ranks: Sequence[int], *, probes: int = 0
) -> tuple[int, int]:
    """Float32 elements of PowerSGD's two messages for one bucket (Vogels et al. 2019, algorithm 1).

    A tensor with two or more dimensions is treated as an m x n matrix: the first dimension by all others. Its left
    factor, r m elements, is in the first message, and its right factor, r n elements, in the second. If r (m + n) is at
    least m n, the tensor is sent uncompressed with the first message, as are tensors of one dimension.

    Args:
        shapes: Shapes of the tensors in the bucket.
        ranks: r, the rank of each tensor's approximation; 0 to send it uncompressed.
        probes: Number of vectors of m elements sent with every left factor.
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
    """Bytes of one rank's share of a bucket whose tensors are packed as integers of different bit widths.

    Adjacent tensors of the same bit width form one piece, and each rank has a share of every piece.
    """
    sizes = zip(bits, (prod(shape) for shape in shapes), strict=True)
    pieces = [
        (width, sum(size for _, size in run)) for width, run in groupby(sizes, key=lambda pair: pair[0])
    ]
    return sum(blocks_bytes(share_size(size, world_size, block), block, width) for width, size in pieces)
