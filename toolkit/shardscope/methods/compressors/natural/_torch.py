"""Natural compression: sign and exponent, 9 bits per element (Horvath et al. 2019).

A number is rounded stochastically to the next power of two above or below, without bias. This adds a variance of at
most an eighth of the squared number (theorem 3). On the bits of a float32, this rounding is one addition: random bits
are added to the mantissa, and a carry increments the exponent. A packet contains all exponents, then all signs.
"""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from shardscope.training.compression.bits import pack_bits, packed_size, unpack_bits
from shardscope.training.compression.noise import draw, keys_of
from shardscope.training.compression.pieces import (
    CHUNK,
    PieceCodec,
    as_words,
    cuts,
    over_blocks,
    put,
    words_of,
)

MANTISSA_BITS = 23
MAGNITUDE = 0x7FFF_FFFF
LARGEST_EXPONENT = 254
"""Biased exponent of 2**127; larger numbers are sent as 2**127."""


class NaturalCodec(PieceCodec):
    """Codec that rounds to a power of two; the probability of rounding up is the mantissa as a fraction of 1."""

    unbiased: ClassVar[bool] = True

    def contraction(self, num_elements: int) -> float | None:
        """Return the expected contraction factor; rounding adds a variance of at most an eighth of the square."""
        return 7 / 8

    def num_bytes(self, num_elements: int) -> int:
        return num_elements + packed_size(num_elements, 1)

    def encode(self, values: Tensor, packet: Tensor, seed: int) -> None:
        count, keys = values.numel(), keys_of(seed)
        exponents, signs = packet[:count], packet[count:]
        if self.is_compiled:
            from shardscope.training.compression import loops

            over_blocks(
                loops.encode_natural, CHUNK, count, words_of(values), exponents, signs, CHUNK, as_words(keys)
            )  # fmt: skip
            return
        for start, stop in cuts(count):
            words = values[start:stop].view(torch.int32)
            pack_bits((words < 0).byte(), 1, signs[start // 8 : packed_size(stop, 1)])
            raised = (words & MAGNITUDE).add_(draw(keys, start, stop - start, MANTISSA_BITS))
            exponents[start:stop] = raised.bitwise_right_shift_(MANTISSA_BITS).clamp_(max=LARGEST_EXPONENT)

    def unpack(self, packet: Tensor, out: Tensor, mode: int) -> None:
        count = out.numel()
        exponents, signs = packet[:count], packet[count:]
        if self.is_compiled:
            from shardscope.training.compression import loops

            over_blocks(loops.decode_natural, CHUNK, count, exponents, signs, out, CHUNK, mode)
            return
        for start, stop in cuts(count):
            negative = unpack_bits(signs[start // 8 : packed_size(stop, 1)], 1, stop - start)
            words = exponents[start:stop].int().bitwise_left_shift_(MANTISSA_BITS)
            words |= negative.int() << 31
            put(words.view(torch.float32), out[start:stop], mode)
