"""QSGD: blocks of integers, with unbiased stochastic rounding (Alistarh et al. 2017).

Section 3.1 of the paper scales each block by its 2-norm. The experiments in the paper, and this code, scale by the
largest magnitude in the block, so that all levels are used. With b bits, there are 2**(b-1) - 1 levels on either side
of zero.
"""

from __future__ import annotations

from typing import ClassVar

from torch import Tensor

from shardscope.training.compression.blocks import BlockInt
from shardscope.training.compression.noise import Keys, draw
from shardscope.training.compression.pieces import as_words, over_blocks, words_of
from shardscope.training.compression.scaled import inverse_of

NOISE_BITS = 16
"""Bits of each random number. A float32 represents the sum of such a number and any of up to 255 levels exactly, so
rounding leaves a value on a level unchanged."""


class QsgdCodec(BlockInt):
    """Codec that rounds each element to one of its two adjacent levels, at random, so that decoding is unbiased."""

    unbiased: ClassVar[bool] = True

    def contraction(self, num_elements: int) -> float | None:
        """Return the expected contraction factor; None if the codec is not a contraction.

        Rounding adds a variance of at most a quarter of the squared scale to each element.
        """
        block = min(self.align, max(num_elements, 1))
        delta = 1 - block / (2 * self.largest) ** 2
        return delta if delta > 0 else None

    def quantize(self, rows: Tensor, scales: Tensor, keys: Keys, start: int) -> Tensor:
        return round_stochastically(rows.mul(inverse_of(scales)), self.largest, keys, start)

    def encode_compiled(self, values: Tensor, scales: Tensor, packed: Tensor, keys: Keys) -> None:
        from shardscope.training.compression import loops

        over_blocks(
            loops.encode_stochastically, self.align, values.numel(),
            values, words_of(values), scales, packed, self.align, self.bits, as_words(keys),
        )  # fmt: skip


def round_stochastically(steps: Tensor, levels: int, keys: Keys, start: int) -> Tensor:
    """Round `steps` stochastically to integers in [-levels, levels]; return the integers plus `levels`, as uint8.

    The tensor `steps` is overwritten.
    """
    noise = draw(keys, start, steps.numel(), NOISE_BITS).float().mul_(2.0**-NOISE_BITS).add_(levels)
    return steps.add_(noise.view_as(steps)).clamp_(0.0, 2 * levels + 0.5).byte()
