"""Exact sizes of compressed gradients in bytes: functions on which the formulas of compression methods are based."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from math import prod

import numpy as np
import numpy.typing as npt

from shardscope.analytic.communication.ring import Ints, ring_all_reduce_bytes
from shardscope.spec.compression import Collective

FLOAT_BYTES = 4


def bits_bytes(num_elements: int, bits: int) -> int:
    """Return the bytes of `num_elements` values packed at `bits` bits each, rounded up to a whole byte."""
    return -(-num_elements * bits // 8)


def num_blocks(num_elements: int, block: int) -> int:
    """Return the number of blocks of `block` elements in `num_elements`; the last block may be shorter."""
    return -(-num_elements // block)


def blocks_bytes(num_elements: int, block: int, bits: int) -> int:
    """Return the bytes of block-quantized values: `bits` bits per value, plus one float32 scale per block."""
    return num_blocks(num_elements, block) * FLOAT_BYTES + bits_bytes(num_elements, bits)


def kept_bytes(num_elements: int, ratio: float) -> int:
    """Return the bytes of the float32 values, without indices, if a fraction `ratio` of the elements is sent."""
    return FLOAT_BYTES * int(kept_elements(num_elements, ratio))


def placed_bytes(num_elements: int, ratio: float) -> int:
    """Return the bytes of the float32 values and their indices if a fraction `ratio` of the elements is sent.

    This is the size of a sparse gradient (Lin et al. 2018).
    """
    kept = int(kept_elements(num_elements, ratio))
    return FLOAT_BYTES * kept + int(index_bytes(num_elements, kept))


def share_size(num_elements: int, world_size: int, align: int) -> int:
    """Return the number of elements that each rank sums in a two-phase exchange.

    It is 1/W of all elements, for W ranks, rounded up to a multiple of `align`.
    """
    return -(-num_elements // (world_size * align)) * align


def collective_bytes(collective: Collective, world_size: int, *, directions: int = 1) -> Ints:
    """Return the bytes that each rank sends in one collective; shape `(W,)`, by rank. All-reduces use the ring.

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
    """Return the numbers of float32 elements in PowerSGD's two messages for a bucket (Vogels et al. 2019, algorithm 1).

    A tensor with two or more dimensions is treated as an m x n matrix, where m is the first dimension and n the product
    of the others. For an approximation of rank r, the first message contains the left factor of r m elements, and the
    second message the right factor of r n elements. Tensors of one dimension, and those with r (m + n) >= m n, are sent
    uncompressed in the first message.

    Args:
        shapes: Shapes of the tensors in the bucket.
        ranks: r for each tensor; 0 to send the tensor uncompressed.
        probes: Number of additional vectors of m elements that are sent with every left factor.
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
    """Return the bytes of one rank's share of a bucket whose tensors are quantized with different bit widths.

    Adjacent tensors of the same bit width are packed together as one piece, and each rank has a share of every piece.

    Args:
        shapes: Shapes of the tensors in the bucket.
        bits: Bit width of each tensor.
        block: Number of elements that share a scale.
        world_size: W, the number of ranks.
    """
    sizes = zip(bits, (prod(shape) for shape in shapes), strict=True)
    pieces = [
        (width, sum(size for _, size in run)) for width, run in groupby(sizes, key=lambda pair: pair[0])
    ]
    return sum(blocks_bytes(share_size(size, world_size, block), block, width) for width, size in pieces)


_WIDEST = 48


def kept_elements(num_elements: npt.ArrayLike, ratio: npt.ArrayLike) -> Ints:
    """Return the number of elements sent: `ratio` times `num_elements`, rounded, but at least one if there are any.

    Example:
        >>> int(kept_elements(25_000_000, 0.01))
        250000
    """
    kept = np.maximum(1, np.rint(np.multiply(ratio, num_elements)))
    return np.minimum(kept, num_elements).astype(np.int64)


def index_bytes(num_elements: npt.ArrayLike, kept: npt.ArrayLike) -> Ints:
    """Return the bytes that encode which `kept` of `num_elements` elements are sent. Both may be arrays.

    The shortest of three encodings is used: nothing, if all elements are sent; a bitmap; or the Elias-Fano code.
    Elias-Fano splits each of k ascending indices below n into high and low bits. Low bits are stored unencoded. The
    high bits of all indices are stored in unary, which takes ``k + n/2**low`` bits. The number of low bits is chosen so
    that the code is shortest (Elias 1974, "Efficient storage and retrieval by content and address of static files";
    Fano 1971).

    Example:
        >>> round(8 * int(index_bytes(25_000_000, 250_000)) / 250_000, 2)  # bits per sent element
        8.56
    """
    n, k = (np.asarray(given, dtype=np.int64)[..., None] for given in (num_elements, kept))
    low = np.arange(_WIDEST)
    split = -(-k * low // 8) + -(-(k + (n - 1 >> low)) // 8)
    shortest = np.minimum(split.min(axis=-1), -(-n[..., 0] // 8))
    return np.where(n[..., 0] == k[..., 0], 0, shortest).astype(np.int64)
