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


class _Room(NamedTuple):
    """Views of a flat tensor's blocks and of their places in a packet, with the indices of the drawn blocks."""

    blocks: Tensor
    drawn: Tensor
    packed: Tensor
    rest: Tensor


class RandomBlockCodec(Codec):
    """Codec that keeps a fraction `ratio` of the blocks of `block` elements, unscaled; all ranks keep the same ones."""

    summable = torch.float32
    shared_seed: ClassVar[bool] = True

    def __init__(self, ratio: float, block: int) -> None:
        self.ratio, self.block = ratio, block

    def _counts(self, num_elements: int) -> tuple[int, int]:
        """Return the total number of blocks, and the number of blocks kept."""
        blocks = -(-num_elements // self.block)
        return blocks, num_kept(blocks, self.ratio)

    def contraction(self, num_elements: int) -> float | None:
        blocks, kept = self._counts(num_elements)
        return kept / blocks

    def num_bytes(self, num_elements: int) -> int:
        return 4 * min(num_elements, self._counts(num_elements)[1] * self.block)

    def encode(self, values: Tensor, packet: Tensor, seed: int) -> None:
        room, tail = self._cut(values, packet, seed)
        torch.index_select(room.blocks, 0, room.drawn, out=room.packed)
        room.rest.zero_()  # if the last, shorter block was drawn, the packet is not full
        room.rest[: tail.numel()] = tail

    def decode(self, packet: Tensor, out: Tensor, seed: int, *, add: bool = False) -> None:
        if not add:
            out.zero_()
        room, tail = self._cut(out, packet, seed)
        room.blocks.index_add_(0, room.drawn, room.packed)
        tail += room.rest[: tail.numel()]

    def _cut(self, flat: Tensor, packet: Tensor, seed: int) -> tuple[_Room, Tensor]:
        """Return views of the whole blocks and their places, and the shorter last block, empty if it was not drawn."""
        blocks, kept = self._counts(flat.numel())
        whole = flat.numel() // self.block
        places = draw(blocks, kept, seed)
        drawn = places[places < whole]
        end = drawn.numel() * self.block
        values = packet.view(torch.float32)
        room = _Room(
            flat[: whole * self.block].view(whole, self.block), drawn,
            values[:end].view(-1, self.block), values[end:],
        )  # fmt: skip
        return room, flat[whole * self.block :] if drawn.numel() < kept else flat[:0]


class ScaledRandomBlockCodec(RandomBlockCodec):
    """Codec that scales the kept blocks by the number of all blocks over that of kept ones, to be unbiased."""

    unbiased: ClassVar[bool] = True
    may_overflow: ClassVar[bool] = True

    def contraction(self, num_elements: int) -> float | None:
        return None

    def encode(self, values: Tensor, packet: Tensor, seed: int) -> None:
        super().encode(values, packet, seed)
        blocks, kept = self._counts(values.numel())
        packet.view(torch.float32).mul_(blocks / kept)
