"""Base class for codecs with one scale per block, and functions to compute scales.

A subclass defines how the scale is computed and how values are quantized.
"""

from __future__ import annotations

from abc import abstractmethod
from functools import cache

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from shardscope.training.compression.noise import Keys
from shardscope.training.compression.pieces import CodeCodec

TINY = float(np.finfo(np.float32).tiny)
"""Smallest normal float32. Smaller scales are set to zero, because their reciprocals would be infinite."""
LARGEST = float(np.finfo(np.float32).max)
SHRINK = 2.0**-32
"""Factor applied to values whose sum would be infinite; a power of two, so that the product is exact."""


class BlockCodec(CodeCodec):
    """Base class of codecs with one float32 scale per block of consecutive elements; the last block may be short.

    The abstract methods receive one block per row: shape [number of blocks, block size], the last row padded with
    zeros.

    Args:
        bits: Bits per element, 1 to 8.
        block: Elements per block; a multiple of 8.
    """

    def __init__(self, bits: int, block: int) -> None:
        super().__init__(bits, block)
        self.align = block

    def num_scales(self, num_elements: int) -> int:
        return -(-num_elements // self.align)

    def codes(self, values: Tensor, scales: Tensor, keys: Keys, start: int) -> Tensor:
        rows = self._rows(values)
        some = self._of(scales, start, rows)
        self.scale(rows, some, values.numel())
        return self.quantize(rows, some, keys, start).view(-1)[: values.numel()]

    def values(self, codes: Tensor, scales: Tensor, start: int) -> Tensor:
        rows = self._rows(codes)
        values = self.dequantize(rows).mul_(self._of(scales, start, rows)[:, None])
        return values.view(-1)[: codes.numel()]

    def _rows(self, flat: Tensor) -> Tensor:
        missing = -flat.numel() % self.align
        return (pad(flat, (0, missing)) if missing else flat).view(-1, self.align)

    def _of(self, scales: Tensor, start: int, rows: Tensor) -> Tensor:
        first = start // self.align
        return scales[first : first + len(rows)]

    @abstractmethod
    def scale(self, rows: Tensor, scales: Tensor, count: int) -> None:
        """Compute the scale of each row and write it to `scales`; elements from index `count` on are padding."""

    @abstractmethod
    def quantize(self, rows: Tensor, scales: Tensor, keys: Keys, start: int) -> Tensor:
        """Return the integer code of each element: a uint8 tensor with the shape of `rows`.

        Args:
            rows: The values, one block per row.
            scales: The scale of each row.
            keys: Keys for random numbers.
            start: Index in the tensor of the first element of `rows`.
        """

    @abstractmethod
    def dequantize(self, codes: Tensor) -> Tensor:
        """Return the values of `codes` before multiplication by the scale, as a new float32 tensor."""


def peak_scale(rows: Tensor, scales: Tensor, largest: float) -> None:
    """Set each scale to the block's largest magnitude divided by `largest`, the largest number that a code can hold."""
    torch.amax(rows.abs(), dim=1, out=scales)
    scales.div_(largest)
    scales.masked_fill_(scales < TINY, 0.0)
    scales.clamp_(max=_largest_scale(largest))


@cache
def _largest_scale(largest: float) -> float:
    """Return the largest scale whose product with the largest code is finite in float32.

    The quotient of float32's largest number and the largest code may have been rounded up; then the product overflows.
    """
    scale = np.float32(LARGEST) / np.float32(largest)
    with np.errstate(over="ignore"):
        is_finite = np.isfinite(scale * np.float32(largest))
    return float(scale if is_finite else np.nextafter(scale, np.float32(0)))


def mean_magnitudes(rows: Tensor, count: int) -> Tensor:
    """Return the mean magnitude of each row; elements of a row from index `count` on are padding (zeros)."""
    means = halving_sum(rows.abs()).div_(count)
    too_large = torch.isinf(means)
    if too_large.any():
        shrunk = halving_sum(rows[too_large].abs().mul_(SHRINK)).div_(count)
        means[too_large] = shrunk.clamp_(max=LARGEST * SHRINK).div_(SHRINK)
    return means


def inverse_of(scales: Tensor) -> Tensor:
    """Return 1 / `scales` as a column of shape [blocks, 1]; 0 for a scale of 0."""
    return torch.where(scales > 0, scales.reciprocal(), 0.0)[:, None]


def halving_sum(rows: Tensor) -> Tensor:
    """Return the sum of each row, by repeatedly adding its second half to its first half; `rows` is overwritten.

    The result of a float sum depends on the order of the additions. `loops` uses the same order, so that its sums are
    bitwise identical.
    """
    width = rows.shape[1]
    while width > 1:
        half = (width + 1) // 2
        rows[:, : width - half] += rows[:, half:width]
        width = half
    return rows[:, 0]
