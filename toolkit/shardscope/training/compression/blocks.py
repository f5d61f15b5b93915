"""Block-wise quantization to integers of 2 to 8 bits, with one float32 scale per block.

The scale of a block is its largest magnitude divided by the largest integer, so a single outlier reduces the precision
of its own block only (Dettmers et al. 2022, "8-bit Optimizers via Block-wise Quantization").
"""

from __future__ import annotations

from torch import Tensor

from shardscope.training.compression.noise import Keys
from shardscope.training.compression.pieces import over_blocks, words_of
from shardscope.training.compression.scaled import BlockCodec, inverse_of, peak_scale


class BlockInt(BlockCodec):
    """Codec that rounds each element to the nearest of 2**bits - 1 evenly spaced values, symmetric about zero.

    Ties are rounded to the even integer.

    Args:
        bits: Bits per element, 2 to 8.
        block: Number of consecutive elements that share a scale; a multiple of 8.
    """

    def __init__(self, bits: int, block: int) -> None:
        super().__init__(bits, block)
        self.largest = 2 ** (bits - 1) - 1

    def contraction(self, num_elements: int) -> float | None:
        """Return delta, the factor defined in `Codec.contraction`.

        The bound follows from the errors: the error of each element is at most half a scale and at most the element's
        own magnitude, and the error of the largest element in each block is zero.
        """
        block = min(self.align, max(num_elements, 1))
        delta = 1 - block / float(2 * self.largest) ** 2
        return max(1 / block, delta)

    def scale(self, rows: Tensor, scales: Tensor, count: int) -> None:  # noqa: ARG002
        peak_scale(rows, scales, self.largest)

    def quantize(self, rows: Tensor, scales: Tensor, keys: Keys, start: int) -> Tensor:  # noqa: ARG002
        return rows.mul(inverse_of(scales)).round_().add_(self.largest).byte()

    def dequantize(self, codes: Tensor) -> Tensor:
        return codes.float().sub_(self.largest)

    def encode_compiled(self, values: Tensor, scales: Tensor, packed: Tensor, keys: Keys) -> None:  # noqa: ARG002
        from shardscope.training.compression import loops

        over_blocks(
            loops.encode_nearest, self.align, values.numel(),
            values, words_of(values), scales, packed, self.align, self.bits,
        )  # fmt: skip

    def unpack_compiled(self, scales: Tensor, packed: Tensor, out: Tensor, mode: int) -> None:
        from shardscope.training.compression import loops

        over_blocks(
            loops.decode_integers, self.align, out.numel(),
            scales, packed, out, self.align, self.bits, mode,
        )  # fmt: skip
