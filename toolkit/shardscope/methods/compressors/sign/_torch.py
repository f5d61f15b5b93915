"""Codecs that send one bit per element, its sign.

`BlockSign` also sends each block's mean magnitude, which makes it a contraction, and needs error feedback to converge
(Karimireddy et al. 2019). `Vote` sends only signs: the ranks vote on every element (Bernstein et al. 2018, signSGD
with majority vote). The result is +1 or -1, which is a direction rather than a gradient. One bit cannot encode zero.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from shardscope.training.compression.noise import Keys
from shardscope.training.compression.packed import Packed
from shardscope.training.compression.pieces import (
    CHUNK,
    PIECE,
    CodeCodec,
    as_words,
    over_blocks,
    words_of,
)
from shardscope.training.compression.scaled import BlockCodec, mean_magnitudes


class BlockSign(BlockCodec):
    """Codec that sends the sign of each element, and decodes it to plus or minus the mean magnitude of its block.

    Args:
        block: Number of elements that share a scale, a multiple of 8.
    """

    def __init__(self, block: int) -> None:
        super().__init__(1, block)

    def contraction(self, num_elements: int) -> float | None:
        """Return 1/d, where d is the block size.

        The squared error is |x|_2^2 - |x|_1^2 / d, and the 1-norm is at least the 2-norm.
        """
        return 1 / min(self.align, max(num_elements, 1))

    def scale(self, rows: Tensor, scales: Tensor, count: int) -> None:
        whole = count // self.align
        scales[:whole] = mean_magnitudes(rows[:whole], self.align)
        if count % self.align:
            scales[whole:] = mean_magnitudes(rows[whole:], count % self.align)

    def quantize(self, rows: Tensor, scales: Tensor, keys: Keys, start: int) -> Tensor:
        return _negative(rows)

    def dequantize(self, codes: Tensor) -> Tensor:
        return _plus_or_minus(codes)

    def encode_compiled(self, values: Tensor, scales: Tensor, packed: Tensor, keys: Keys) -> None:
        from shardscope.training.compression import loops

        over_blocks(
            loops.encode_block_signs, self.align, values.numel(),
            values, words_of(values), scales, packed, self.align,
        )  # fmt: skip

    def unpack_compiled(self, scales: Tensor, packed: Tensor, out: Tensor, mode: int) -> None:
        from shardscope.training.compression import loops

        over_blocks(
            loops.decode_signs, self.align, out.numel(), scales, packed, out, self.align, mode
        )  # fmt: skip


class Vote(CodeCodec):
    """Codec that sends the sign of each element. A zero counts as + or -, depending on its index and the seed."""

    def __init__(self) -> None:
        super().__init__(1)

    def num_scales(self, num_elements: int) -> int:
        return 0

    def codes(self, values: Tensor, scales: Tensor, keys: Keys, start: int) -> Tensor:
        return torch.where(values == 0, _alternating(values.numel(), start + keys[0]), _negative(values))

    def values(self, codes: Tensor, scales: Tensor, start: int) -> Tensor:
        return _plus_or_minus(codes)

    def encode_compiled(self, values: Tensor, scales: Tensor, packed: Tensor, keys: Keys) -> None:
        from shardscope.training.compression import loops

        del scales
        over_blocks(
            loops.encode_votes, CHUNK, values.numel(),
            values, words_of(values), packed, as_words(keys)[0], CHUNK,
        )  # fmt: skip

    def unpack_compiled(self, scales: Tensor, packed: Tensor, out: Tensor, mode: int) -> None:
        from shardscope.training.compression import loops

        del scales
        over_blocks(
            loops.decode_signs, CHUNK, out.numel(), torch.ones(1), packed, out, CHUNK, mode
        )  # fmt: skip


class MajorityVote(Packed):
    """Majority vote, counted by each rank for its share. Ties alternate between + and -, by element and by step."""

    def __init__(self, name: str) -> None:
        self._votes = Vote()
        super().__init__(name, self._votes)

    def conclude_(self, mean: Tensor, step: int) -> None:
        first = -1.0 if step % 2 else 1.0
        if self._votes.is_compiled and mean.dtype == torch.float32:
            from shardscope.training.compression import loops

            over_blocks(loops.conclude_votes, CHUNK, mean.numel(), mean, np.float32(first), CHUNK)
            return
        for piece in mean.split(PIECE):
            piece.sign_()
            for offset, tie in enumerate((first, -first)):
                every_other = piece[offset::2]
                every_other.masked_fill_(every_other == 0, tie)


def _negative(values: Tensor) -> Tensor:
    """Return 1 where the sign bit is set, else 0."""
    return (values.view(torch.int32) < 0).byte()


def _plus_or_minus(codes: Tensor) -> Tensor:
    return codes.float().mul_(-2.0).add_(1.0)


def _alternating(count: int, first: int) -> Tensor:
    """Return 0, 1, 0, 1 and so on, starting with 1 if `first` is odd."""
    return (torch.arange(count, dtype=torch.uint8) + first % 2).bitwise_and_(1)
