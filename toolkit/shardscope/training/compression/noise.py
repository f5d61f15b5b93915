"""Cheap random numbers that can be drawn for each element independently: a hash of a seed and the element's index.

Stochastic rounding needs one random number per element. A generator's stream would cost more than all the rest of
packing, and cannot be split among threads or between compiled and plain code; a hash can. It mixes 32-bit integers by
shifts and odd multipliers (those of Wellons' lowbias32; `loops.draw` is the same hash, compiled). These numbers are
good enough for rounding, and for nothing else.
"""

from __future__ import annotations

import torch
from torch import Tensor

MULTIPLIERS = (0x7FEB352D, 0x846CA68B)
_WORD = 2**32

Keys = tuple[int, int]
"""Two 32-bit integers that identify a stream of random numbers."""


def keys_of(seed: int) -> Keys:
    """The keys of a seed; neighbouring seeds give unrelated keys."""
    first = _mix(seed % _WORD)
    return first, _mix(first ^ 0x9E3779B9)


def _mix(word: int) -> int:
    for shift, multiplier in zip((16, 15), MULTIPLIERS, strict=True):
        word = (word ^ (word >> shift)) * multiplier % _WORD
    return word ^ (word >> 16)


def draw(keys: Keys, start: int, count: int, bits: int) -> Tensor:
    """Random integers of `bits` bits (1 to 31) for the elements from `start` on, int32."""
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
    """XOR with the upper bits; int32 shifts copies of the sign in, which are masked out."""
    words ^= (words >> shift).bitwise_and_(2 ** (32 - shift) - 1)


def _signed(word: int) -> int:
    """The int32 with the same bits."""
    word %= _WORD
    return word - _WORD if word >= _WORD // 2 else word
