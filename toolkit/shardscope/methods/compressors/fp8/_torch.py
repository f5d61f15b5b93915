"""8-bit floats in blocks: 4 exponent bits, 3 mantissa bits (e4m3), and one float32 scale per block.

The scale maps a block's largest magnitude to 448, the largest e4m3 number (Micikevicius et al. 2022, FP8 formats for
deep learning). Unlike 8-bit integers, 8-bit floats keep the leading digits of small numbers in blocks with large ones.
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

from shardscope.training.compression.noise import Keys
from shardscope.training.compression.pieces import over_blocks, words_of
from shardscope.training.compression.scaled import BlockCodec, inverse_of, peak_scale

FORMAT = torch.float8_e4m3fn
LARGEST = 448.0


class BlockFloat8(BlockCodec):
    """Codec that rounds to the nearest e4m3 number, ties to even.

    Args:
        block: Number of elements that share a scale, a multiple of 8.
    """

    def __init__(self, block: int) -> None:
        super().__init__(8, block)

    def contraction(self, num_elements: int) -> float | None:
        """Return the contraction factor.

        The rounding error is at most 2**-4 times the element; for subnormal numbers, it is at most 2**-10 times the
        scale.
        """
        return 1 - 2.0**-8 - self.align * (2.0**-10 / LARGEST) ** 2

    def scale(self, rows: Tensor, scales: Tensor, count: int) -> None:
        peak_scale(rows, scales, LARGEST)

    def quantize(self, rows: Tensor, scales: Tensor, keys: Keys, start: int) -> Tensor:
        return rows.mul(inverse_of(scales)).to(FORMAT).view(torch.uint8)

    def dequantize(self, codes: Tensor) -> Tensor:
        return codes.view(FORMAT).float()

    def encode_compiled(self, values: Tensor, scales: Tensor, packed: Tensor, keys: Keys) -> None:
        from shardscope.training.compression import loops

        over_blocks(
            loops.encode_float8, self.align, values.numel(),
            values, words_of(values), scales, packed, self.align,
        )  # fmt: skip

    def unpack_compiled(self, scales: Tensor, packed: Tensor, out: Tensor, mode: int) -> None:
        from shardscope.training.compression import loops

        over_blocks(
            loops.decode_float8, self.align, out.numel(),
            scales, packed, _numbers(), out, self.align, mode,
        )  # fmt: skip


@cache
def _numbers() -> Tensor:
    """Return the values of all 256 e4m3 codes as a float32 tensor, indexed by code."""
    return torch.arange(256, dtype=torch.uint8).view(FORMAT).float()
