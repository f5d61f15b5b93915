"""Random-k: all ranks send the same k of n elements, redrawn for each bucket and step, so only values are sent.

Values are summed during the all-reduce, like an uncompressed gradient. With error feedback, values are sent unscaled,
and the other elements stay in the residual (Stich et al. 2018, Sparsified SGD with memory); the expected contraction
factor is k/n. Without error feedback, values are multiplied by n/k, which makes decoding unbiased and the variance n/k
times as large.
"""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from shardscope.training.compression.codec import Codec
from shardscope.training.compression.randomk_draw import draw


def num_kept(num_elements: int, ratio: float) -> int:
    """Return the number of elements to send: `ratio` times `num_elements`, rounded, but at least 1 if possible."""
    return min(num_elements, max(1, round(ratio * num_elements)))


class RandomKCodec(Codec):
    """Codec that keeps a fraction `ratio` of the elements, unscaled; all ranks keep the same elements."""

    summable = torch.float32
    shared_seed: ClassVar[bool] = True

    def __init__(self, ratio: float) -> None:
        self.ratio = ratio

    def contraction(self, num_elements: int) -> float | None:
        return num_kept(num_elements, self.ratio) / num_elements

    def num_bytes(self, num_elements: int) -> int:
        return 4 * num_kept(num_elements, self.ratio)

    def encode(self, values: Tensor, packet: Tensor, seed: int) -> None:
        torch.index_select(values, 0, self._places(values.numel(), seed), out=packet.view(torch.float32))

    def decode(self, packet: Tensor, out: Tensor, seed: int, *, add: bool = False) -> None:
        places = self._places(out.numel(), seed)
        if not add:
            out.zero_()
        out.index_add_(0, places, packet.view(torch.float32))

    def _places(self, num_elements: int, seed: int) -> Tensor:
        return draw(num_elements, num_kept(num_elements, self.ratio), seed)


class ScaledRandomKCodec(RandomKCodec):
    """Codec that multiplies the elements it keeps by n/k, so that decoding is unbiased."""

    unbiased: ClassVar[bool] = True
    may_overflow: ClassVar[bool] = True

    def contraction(self, num_elements: int) -> float | None:
        return None

    def encode(self, values: Tensor, packet: Tensor, seed: int) -> None:
        super().encode(values, packet, seed)
        packet.view(torch.float32).mul_(values.numel() / num_kept(values.numel(), self.ratio))
