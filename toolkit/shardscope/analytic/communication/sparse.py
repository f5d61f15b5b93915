"""Sparse gradients: how many elements a ratio keeps, and the bytes that say which."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]
_WIDEST = 48


def kept_elements(num_elements: npt.ArrayLike, ratio: npt.ArrayLike) -> Ints:
    """Elements that are sent of `num_elements`: the nearest whole number to the ratio of them, and at least one of any.

    Example:
        >>> int(kept_elements(25_000_000, 0.01))
        250000
    """
    kept = np.maximum(1, np.rint(np.multiply(ratio, num_elements)))
    return np.minimum(kept, num_elements).astype(np.int64)


def index_bytes(num_elements: npt.ArrayLike, kept: npt.ArrayLike) -> Ints:
    """Bytes that say which `kept` of `num_elements` elements are sent; arrays broadcast.

    The shortest of: ascending indices cut into low bits, written as they are, and high ones in unary, ``k + n/2**low``
    bits in all, at the best number of low bits (Elias 1974, "Efficient storage and retrieval by content and address of
    static files"; Fano 1971); a bitmap; and nothing where all are sent.

    Example:
        >>> 8 * int(index_bytes(25_000_000, 250_000)) / 250_000  # bits an element sent
        8.56
    """
    n, k = (np.asarray(given, dtype=np.int64)[..., None] for given in (num_elements, kept))
    low = np.arange(_WIDEST)
    split = -(-k * low // 8) + -(-(k + (n - 1 >> low)) // 8)
    shortest = np.minimum(split.min(axis=-1), -(-n[..., 0] // 8))
    return np.where(n[..., 0] == k[..., 0], 0, shortest).astype(np.int64)


def least_index_bits(num_elements: npt.ArrayLike, kept: npt.ArrayLike) -> npt.NDArray[np.float64]:
    """The least bits an element sent that any format needs whose length is fixed: log2 of n over k, by k.

    By Stirling's series, within 1e-4 bits from ten elements up.
    """
    n, k = np.asarray(num_elements, dtype=np.float64), np.asarray(kept, dtype=np.float64)
    rest = np.maximum(n - k, 1e-300)
    nats = (
        k * np.log(n / k) + rest * np.log(n / rest) + 0.5 * np.log(n / (2 * np.pi * k * np.maximum(rest, 1)))
    )
    return np.asarray(np.maximum(nats, 0.0) / np.log(2) / k)
