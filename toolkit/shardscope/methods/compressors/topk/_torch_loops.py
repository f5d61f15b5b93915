"""Compiled loops for top-k; `_torch_select` and `_torch_indices` also contain equivalent code in torch and NumPy."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

from shardscope.training.compression.route import choose_route, compiled

# These Python functions are compiled to machine code before they run. A threshold has the dtype of the values.


def _pick(values: Any, threshold: Any, ties: int, indices: Any, picked: Any) -> int:
    """Copy elements with magnitudes above the threshold, and the first `ties` equal to it, to `indices` and `picked`.

    Return the number of such elements, including those that were not copied because the outputs were full.
    """
    count = 0
    for i in range(values.shape[0]):
        magnitude = abs(values[i])
        if magnitude >= threshold:
            if magnitude == threshold:
                if ties == 0:
                    continue
                ties -= 1
            if count < indices.shape[0]:
                indices[count] = i
                picked[count] = values[i]
            count += 1
    return count


def _pick_above(  # noqa: PLR0917 - signature that `share_out` needs
    values: Any, threshold: Any, indices: Any, picked: Any, counts: Any, first: int, stop: int
) -> None:
    """Copy the elements of one part of `values` with magnitudes above the threshold to the output row of that part.

    Few elements are that large, so elements are compared in groups of sixteen, with a single branch per group.
    """
    parts, total = counts.shape[0], values.shape[0]
    part = (first * parts + total - 1) // total
    count, room, i = 0, indices.shape[1], first
    while i < stop:
        end = min(i + 16, stop)
        hits = 0
        for j in range(i, end):
            hits += abs(values[j]) > threshold
        if hits:
            for j in range(i, end):
                if abs(values[j]) > threshold:
                    if count < room:
                        indices[part, count] = j
                        picked[part, count] = values[j]
                    count += 1
        i = end
    counts[part] = count


def _write(indices: Any, low_bits: int, low: Any, high: Any) -> None:
    """Encode indices as low bits and unary high bits, or as a bitmap if `low_bits` is -1; outputs must be zeroed."""
    mask = (1 << low_bits) - 1 if low_bits > 0 else 0
    room, filled, end = 0, 0, 0
    for j in range(indices.shape[0]):
        place = indices[j] if low_bits < 0 else (indices[j] >> low_bits) + j
        high[place >> 3] |= 1 << (place & 7)
        if low_bits > 0:
            room |= (indices[j] & mask) << filled
            filled += low_bits
            while filled >= 8:
                low[end] = room & 255
                room >>= 8
                filled -= 8
                end += 1
    if filled > 0:
        low[end] = room & 255


def _read(low: Any, high: Any, low_bits: int, indices: Any) -> None:
    mask = (1 << low_bits) - 1 if low_bits > 0 else 0
    room, filled, end, j = 0, 0, 0, 0
    for byte in range(high.shape[0]):
        bits = high[byte]
        if bits == 0:
            continue
        for bit in range(8):
            if bits >> bit & 1 and j < indices.shape[0]:
                place = byte * 8 + bit
                if low_bits >= 0:
                    while filled < low_bits:
                        room |= low[end] << filled
                        filled += 8
                        end += 1
                    place = (place - j) << low_bits | (room & mask)
                    room >>= low_bits
                    filled -= low_bits
                indices[j] = place
                j += 1


class Loops(NamedTuple):
    """The loops of this module, compiled to machine code."""

    pick: Callable[..., int]
    pick_above: Callable[..., None]
    write: Callable[..., None]
    read: Callable[..., None]


@cache
def compiled_loops() -> Loops:
    """Return the loops of this module; each loop is compiled on its first call."""
    return Loops(compiled(_pick), compiled(_pick_above), compiled(_write), compiled(_read))


def chosen_loops() -> Loops | None:
    """Return the compiled loops; None if codecs run in plain torch (see `choose_route`)."""
    return compiled_loops() if choose_route() == "numba" else None
