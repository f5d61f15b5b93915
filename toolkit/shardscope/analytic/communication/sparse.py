"""Sparse gradients: the number of elements that are sent, and the bytes that encode their indices."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]
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
