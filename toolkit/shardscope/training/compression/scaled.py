"""Codecs with one scale per block; a subclass defines how the scale is computed and how values are coded."""

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
"""Scales below float32's smallest normal number count as zero: their reciprocals would be infinite."""
LARGEST = float(np.finfo(np.float32).max)
SHRINK = 2.0**-32
"""Factor for values whose sum would be infinite; a power of two, so that the product is not rounded."""


class BlockCodec(CodeCodec):
    """Base class: one float32 scale per block of consecutive elements. The last block may be short.

    The abstract methods receive blocks as rows, [blocks, block], the last padded with zeros.
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
        """Fill in the scales of some blocks; the first `count` elements are not padding."""

    @abstractmethod
    def quantize(self, rows: Tensor, scales: Tensor, keys: Keys, start: int) -> Tensor:
        """Return codes, uint8 and shaped like `rows`; `start` is the index of the first element."""

    @abstractmethod
    def dequantize(self, codes: Tensor) -> Tensor:
        """Return the values of the codes at a scale of 1, as a new float32 tensor."""


def peak_scale(rows: Tensor, scales: Tensor, largest: float) -> None:
    """Set each scale to its block's largest magnitude divided by the largest number that a code can represent."""
    torch.amax(rows.abs(), dim=1, out=scales)
    scales.div_(largest)
    scales.masked_fill_(scales < TINY, 0.0)
    scales.clamp_(max=_largest_scale(largest))


@cache
def _largest_scale(largest: float) -> float:
    """Largest scale at which the largest code stays finite: dividing float32's largest number may have rounded up."""
    scale = np.float32(LARGEST) / np.float32(largest)
    with np.errstate(over="ignore"):
        is_finite = np.isfinite(scale * np.float32(largest))
    return float(scale if is_finite else np.nextafter(scale, np.float32(0)))


def mean_magnitudes(rows: Tensor, count: int) -> Tensor:
    """Mean magnitude of each row, whose first `count` elements are not padding."""
    means = halving_sum(rows.abs()).div_(count)
    too_large = torch.isinf(means)
    if too_large.any():
        shrunk = halving_sum(rows[too_large].abs().mul_(SHRINK)).div_(count)
        means[too_large] = shrunk.clamp_(max=LARGEST * SHRINK).div_(SHRINK)
    return means


def inverse_of(scales: Tensor) -> Tensor:
    """1 / scale, as a column; 0 where the scale is 0."""
    return torch.where(scales > 0, scales.reciprocal(), 0.0)[:, None]


def halving_sum(rows: Tensor) -> Tensor:
    """Sums of rows, by adding their second half to their first until one column is left; `rows` is overwritten.

    Float sums depend on their order. This order is the same in `loops`, so the sums are bit-identical.
    """
    width = rows.shape[1]
    while width > 1:
        half = (width + 1) // 2
        rows[:, : width - half] += rows[:, half:width]
        width = half
    return rows[:, 0]
