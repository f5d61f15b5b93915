"""Sparse gradients: the number of elements that a ratio keeps, and the bytes of their indices."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]
_WIDEST = 48


def kept_elements(num_elements: npt.ArrayLike, ratio: npt.ArrayLike) -> Ints:
    """Number of elements sent: `ratio` times `num_elements`, rounded, and at least one unless there are none.

    Example:
        >>> int(kept_elements(25_000_000, 0.01))
        250000
    """
    kept = np.maximum(1, np.rint(np.multiply(ratio, num_elements)))
    return np.minimum(kept, num_elements).astype(np.int64)


def index_bytes(num_elements: npt.ArrayLike, kept: npt.ArrayLike) -> Ints:
    """Bytes that encode which `kept` of `num_elements` elements are sent; arguments follow NumPy broadcasting.

    This is the shortest of three encodings. Elias-Fano splits ascending indices into low bits, stored verbatim, and
    high bits in unary, which take ``k + n/2**low`` bits, at the best number of low bits (Elias 1974, "Efficient storage
    and retrieval by content and address of static files"; Fano 1971). The other two are a bitmap, and an empty encoding
    if all elements are sent.

    Example:
        >>> 8 * int(index_bytes(25_000_000, 250_000)) / 250_000  # bits per sent element
        8.56
    """
    n, k = (np.asarray(given, dtype=np.int64)[..., None] for given in (num_elements, kept))
    low = np.arange(_WIDEST)
    split = -(-k * low // 8) + -(-(k + (n - 1 >> low)) // 8)
    shortest = np.minimum(split.min(axis=-1), -(-n[..., 0] // 8))
    return np.where(n[..., 0] == k[..., 0], 0, shortest).astype(np.int64)


def least_index_bits(num_elements: npt.ArrayLike, kept: npt.ArrayLike) -> npt.NDArray[np.float64]:
    """Minimum bits per sent element for any fixed-length encoding: log2 of the binomial coefficient (n over k), over k.

    Uses Stirling's series; accurate within 1e-4 bits from ten elements up.
    """
    n, k = np.asarray(num_elements, dtype=np.float64), np.asarray(kept, dtype=np.float64)
    rest = np.maximum(n - k, 1e-300)
    nats = (
        k * np.log(n / k) + rest * np.log(n / rest) + 0.5 * np.log(n / (2 * np.pi * k * np.maximum(rest, 1)))
    )
    return np.asarray(np.maximum(nats, 0.0) / np.log(2) / k)
