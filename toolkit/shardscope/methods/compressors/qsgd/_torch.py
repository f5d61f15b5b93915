"""QSGD: blocks of integers, with unbiased stochastic rounding (Alistarh et al. 2017).

Section 3.1 of the paper scales by a block's 2-norm. Its experiments, and this code, scale by the largest magnitude,
which uses all levels. With b bits there are 2**(b-1) - 1 levels on either side of zero.
"""

from __future__ import annotations

from typing import ClassVar

from torch import Tensor

from shardscope.training.compression.noise import Keys, draw
from shardscope.training.compression.pieces import as_words, over_blocks, words_of
from shardscope.training.compression.scaled import BlockCodec, inverse_of, peak_scale

NOISE_BITS = 16
"""Bits of each random number; a float32 holds its sum with 255 levels exactly, so values on a level are unchanged."""


class QsgdCodec(BlockCodec):
    """Codec that rounds to one of the two nearest levels, with probabilities that make decoding unbiased.

    Args:
        bits: Bits per element, including the sign, 2 to 8.
        block: Number of elements that share a scale, a multiple of 8.
    """

    unbiased: ClassVar[bool] = True

    def __init__(self, bits: int, block: int) -> None:
        super().__init__(bits, block)
        self.levels = 2 ** (bits - 1) - 1

    def contraction(self, num_elements: int) -> float | None:
        """Return the contraction factor; the variance of an element is at most a quarter of the squared scale."""
        block = min(self.align, max(num_elements, 1))
        delta = 1 - block / (2 * self.levels) ** 2
        return delta if delta > 0 else None

    def scale(self, rows: Tensor, scales: Tensor, count: int) -> None:
        peak_scale(rows, scales, self.levels)

    def quantize(self, rows: Tensor, scales: Tensor, keys: Keys, start: int) -> Tensor:
        return round_at_random(rows.mul(inverse_of(scales)), self.levels, keys, start)

    def dequantize(self, codes: Tensor) -> Tensor:
        return codes.float().sub_(self.levels)

    def encode_compiled(self, values: Tensor, scales: Tensor, packed: Tensor, keys: Keys) -> None:
        from shardscope.training.compression import loops

        over_blocks(
            loops.encode_at_random, self.align, values.numel(),
            values, words_of(values), scales, packed, self.align, self.bits, as_words(keys),
        )  # fmt: skip

    def unpack_compiled(self, scales: Tensor, packed: Tensor, out: Tensor, mode: int) -> None:
        from shardscope.training.compression import loops

        over_blocks(
            loops.decode_integers, self.align, out.numel(),
            scales, packed, out, self.align, self.bits, mode,
        )  # fmt: skip


def round_at_random(steps: Tensor, levels: int, keys: Keys, start: int) -> Tensor:
    """Round `steps` (overwritten) stochastically to integers in [-levels, levels]; returns uint8 codes from 0."""
    noise = draw(keys, start, steps.numel(), NOISE_BITS).float().mul_(2.0**-NOISE_BITS).add_(levels)
    return steps.add_(noise.view_as(steps)).clamp_(0.0, 2 * levels + 0.5).byte()
