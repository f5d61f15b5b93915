"""Codecs that send one bit per element, its sign.

`BlockSign` also sends the mean magnitude of each block. It is a contraction, and needs error feedback to converge
(Karimireddy et al. 2019). `Vote` sends only signs, and the ranks decide each sign by majority vote (Bernstein et al.
2018, signSGD with majority vote). A vote results in +1 or -1 for each element, which is a direction rather than a
gradient. Neither codec can represent zero, since one bit has only two values.
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
        """Return the contraction factor 1/d, where d is the block size.

        The squared error of a block x is |x|_2^2 - |x|_1^2 / d, and its 1-norm is at least its 2-norm.
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
    """Codec that sends the sign of each element; a zero is sent as + or -, depending on its index and the seed."""

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
    """Compressor that decides the sign of each element by a majority vote of the ranks.

    Each rank counts the votes for its share of the elements. Ties are decided as + and - in turn, alternating both from
    element to element and from step to step.
    """

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
    """Return a uint8 tensor that is 1 where the sign bit of a value is set, and 0 elsewhere."""
    return (values.view(torch.int32) < 0).byte()


def _plus_or_minus(codes: Tensor) -> Tensor:
    return codes.float().mul_(-2.0).add_(1.0)


def _alternating(count: int, first: int) -> Tensor:
    """Return `count` values that alternate between 0 and 1, starting with 1 if `first` is odd, and with 0 otherwise."""
    return (torch.arange(count, dtype=torch.uint8) + first % 2).bitwise_and_(1)
