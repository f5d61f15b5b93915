"""TernGrad: send each element as -1, 0 or +1 in 2 bits, with one scale per packet (Wen et al. 2017).

Values are first clipped at a multiple of the packet's standard deviation (2.5 in section 4 of the paper), because
otherwise a single outlier would set nearly all others to zero. The standard deviation is computed around zero.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import pad

from shardscope.methods.compressors.qsgd._torch import round_stochastically
from shardscope.training.compression.noise import Keys
from shardscope.training.compression.pieces import CHUNK, CodeCodec, as_words, cuts, over_blocks, words_of
from shardscope.training.compression.scaled import TINY, halving_sum


class Ternary(CodeCodec):
    """Codec that rounds a value to plus or minus the scale, with a probability proportional to its magnitude, or to 0.

    The expected result is the clipped value, not the value itself, so the codec does not count as unbiased.

    Args:
        clip: Clipping threshold, in standard deviations of a packet.
    """

    def __init__(self, clip: float) -> None:
        super().__init__(2)
        self.clip = clip

    def num_scales(self, num_elements: int) -> int:
        return 1

    def scale_of(self, peak: float, squares: NDArray[np.float64], count: int) -> float:
        """Return the scale of a packet: the largest magnitude after clipping.

        Args:
            peak: Largest magnitude before clipping.
            squares: Sum of squares of each chunk.
            count: Number of elements.
        """
        deviation = math.sqrt(float(squares.sum()) / max(count, 1))
        scale = float(np.float32(min(peak, self.clip * deviation)))
        return scale if scale >= TINY else 0.0

    def begin(self, values: Tensor, scales: Tensor) -> None:
        peak, squares = 0.0, [np.zeros(0)]
        for start, stop in cuts(values.numel(), CHUNK):
            piece = values[start:stop]
            peak = max(peak, float(piece.abs().max()))
            squares.append(_sums_of_squares(piece).numpy())
        scales[0] = self.scale_of(peak, np.concatenate(squares), values.numel())

    def codes(self, values: Tensor, scales: Tensor, keys: Keys, start: int) -> Tensor:
        return round_stochastically(values * _inverse(float(scales[0])), 1, keys, start)

    def values(self, codes: Tensor, scales: Tensor, start: int) -> Tensor:
        return codes.float().sub_(1.0).mul_(scales[0])

    def encode_compiled(self, values: Tensor, scales: Tensor, packed: Tensor, keys: Keys) -> None:
        from shardscope.training.compression import loops

        count, num_chunks = values.numel(), -(-values.numel() // CHUNK)
        peaks, squares = torch.empty(num_chunks), torch.empty(num_chunks, dtype=torch.float64)
        over_blocks(
            loops.measure, CHUNK, count, values, words_of(values), words_of(peaks), squares, CHUNK
        )  # fmt: skip
        peak = float(peaks.max()) if count else 0.0
        scales[0] = self.scale_of(peak, squares.numpy(), count)
        scale = np.float32(float(scales[0]))
        over_blocks(loops.encode_ternary, CHUNK, count, values, scale, packed, CHUNK, as_words(keys))

    def unpack_compiled(self, scales: Tensor, packed: Tensor, out: Tensor, mode: int) -> None:
        from shardscope.training.compression import loops

        over_blocks(loops.decode_integers, CHUNK, out.numel(), scales, packed, out, CHUNK, 2, mode)


def _sums_of_squares(piece: Tensor) -> Tensor:
    rows = pad(piece, (0, -piece.numel() % CHUNK)).view(-1, CHUNK)
    return halving_sum(rows.double().square_())


def _inverse(scale: float) -> float:
    """Return the reciprocal of the scale, computed in float32; 0 if the scale is 0."""
    return float(np.float32(1) / np.float32(scale)) if scale else 0.0
