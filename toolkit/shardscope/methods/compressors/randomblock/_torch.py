"""Random-block: random-k with blocks of consecutive elements, copied as a whole instead of element by element.

All blocks have the same size, except that the last may be shorter. Every block is drawn with the same probability.
"""

from __future__ import annotations

from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from shardscope.methods.compressors.randomk._torch import num_kept
from shardscope.training.compression.codec import Codec
from shardscope.training.compression.randomk_draw import draw


class _Views(NamedTuple):
    """Views for copying between the whole blocks of a flat tensor and a packet.

    Attributes:
        blocks: All whole blocks, one per row.
        drawn: Indices of the whole blocks that were drawn.
        packed: The part of the packet for these blocks, one per row.
        rest: The remaining part of the packet, for the shorter last block.
    """

    blocks: Tensor
    drawn: Tensor
    packed: Tensor
    rest: Tensor


class RandomBlockCodec(Codec):
    """Codec that keeps a fraction `ratio` of the blocks of `block` elements, unscaled and the same on all ranks."""

    summable = torch.float32
    shared_seed: ClassVar[bool] = True

    def __init__(self, ratio: float, block: int) -> None:
        self.ratio, self.block = ratio, block

    def _counts(self, num_elements: int) -> tuple[int, int]:
        """Return the total number of blocks, and the number of blocks to send."""
        blocks = -(-num_elements // self.block)
        return blocks, num_kept(blocks, self.ratio)

    def contraction(self, num_elements: int) -> float | None:
        blocks, kept = self._counts(num_elements)
        return kept / blocks

    def num_bytes(self, num_elements: int) -> int:
        return 4 * min(num_elements, self._counts(num_elements)[1] * self.block)

    def encode(self, values: Tensor, packet: Tensor, seed: int) -> None:
        views, tail = self._cut(values, packet, seed)
        torch.index_select(views.blocks, 0, views.drawn, out=views.packed)
        views.rest.zero_()  # if the last, shorter block was drawn, the packet is not full
        views.rest[: tail.numel()] = tail

    def decode(self, packet: Tensor, out: Tensor, seed: int, *, add: bool = False) -> None:
        if not add:
            out.zero_()
        views, tail = self._cut(out, packet, seed)
        views.blocks.index_add_(0, views.drawn, views.packed)
        tail += views.rest[: tail.numel()]

    def _cut(self, flat: Tensor, packet: Tensor, seed: int) -> tuple[_Views, Tensor]:
        """Return views for copying (see `_Views`), and the shorter last block, which is empty if it was not drawn."""
        blocks, kept = self._counts(flat.numel())
        whole = flat.numel() // self.block
        places = draw(blocks, kept, seed)
        drawn = places[places < whole]
        end = drawn.numel() * self.block
        values = packet.view(torch.float32)
        views = _Views(
            flat[: whole * self.block].view(whole, self.block), drawn,
            values[:end].view(-1, self.block), values[end:],
        )  # fmt: skip
        return views, flat[whole * self.block :] if drawn.numel() < kept else flat[:0]


class ScaledRandomBlockCodec(RandomBlockCodec):
    """Codec that multiplies the blocks it keeps by (number of blocks) / (number kept), so that decoding is unbiased."""

    unbiased: ClassVar[bool] = True
    may_overflow: ClassVar[bool] = True

    def contraction(self, num_elements: int) -> float | None:
        return None

    def encode(self, values: Tensor, packet: Tensor, seed: int) -> None:
        super().encode(values, packet, seed)
        blocks, kept = self._counts(values.numel())
        packet.view(torch.float32).mul_(blocks / kept)
