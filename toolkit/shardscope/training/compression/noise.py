"""Fast random numbers for stochastic rounding: a hash of a seed and an element's index.

Stochastic rounding needs one random number per element. Drawing them from a generator would take longer than the rest
of packing, and one generator cannot serve several threads in a reproducible order. A hash needs no order. It mixes
32-bit integers by shifts and odd multipliers (those of lowbias32 by Wellons); `loops.draw` is the same hash, compiled.
The numbers are random enough for rounding only.
"""

from __future__ import annotations

import torch
from torch import Tensor

MULTIPLIERS = (0x7FEB352D, 0x846CA68B)
_WORD = 2**32

Keys = tuple[int, int]
"""Two 32-bit integers that select a sequence of random numbers."""


def keys_of(seed: int) -> Keys:
    """Return the keys for `seed`; consecutive seeds give unrelated keys."""
    first = _mix(seed % _WORD)
    return first, _mix(first ^ 0x9E3779B9)


def _mix(word: int) -> int:
    for shift, multiplier in zip((16, 15), MULTIPLIERS, strict=True):
        word = (word ^ (word >> shift)) * multiplier % _WORD
    return word ^ (word >> 16)


def draw(keys: Keys, start: int, count: int, bits: int) -> Tensor:
    """Return a random integer for each of `count` elements, as an int32 tensor.

    Args:
        keys: The keys for a seed, from `keys_of`.
        start: Index of the first element.
        count: Number of elements.
        bits: Bits of each random integer, 1 to 31.
    """
    words = torch.arange(count, dtype=torch.int32)
    words += _signed(start + keys[0])
    _fold(words, 16)
    words *= _signed(MULTIPLIERS[0])
    _fold(words, 15)
    words += _signed(keys[1])
    words *= _signed(MULTIPLIERS[1])
    return words.bitwise_right_shift_(32 - bits).bitwise_and_(
        2**bits - 1
    )  # the upper bits are the best mixed


def _fold(words: Tensor, shift: int) -> None:
    """XOR each word with its upper bits, in place; shifting an int32 copies the sign bit, so the copies are masked."""
    words ^= (words >> shift).bitwise_and_(2 ** (32 - shift) - 1)


def _signed(word: int) -> int:
    """Return the int32 that has the same bits as the unsigned `word`."""
    word %= _WORD
    return word - _WORD if word >= _WORD // 2 else word
