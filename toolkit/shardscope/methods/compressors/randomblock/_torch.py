"""Random-block: as random-k, but whole blocks of neighbours, which are copied instead of collected one by one.

All blocks are of one size but the last, which may be shorter; every block is drawn with the same chance.
"""

from __future__ import annotations

from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from shardscope.methods.compressors.randomk._torch import num_kept
from shardscope.training.compression.codec import Codec
from shardscope.training.compression.randomk_draw import draw


class _Room(NamedTuple):
    """Blocks of a flat tensor, those drawn of them, and where they lie in a packet; all views."""

    blocks: Tensor
    drawn: Tensor
    packed: Tensor
    rest: Tensor


class RandomBlock(Codec):
    """Keeps a share `ratio` of the blocks of `block` elements, the same on all ranks, as they are."""

    summable = torch.float32
    shared_seed: ClassVar[bool] = True

    def __init__(self, ratio: float, block: int) -> None:
        self.ratio, self.block = ratio, block

    def _counts(self, num_elements: int) -> tuple[int, int]:
        """Blocks in all, and blocks kept."""
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
        room.rest.zero_()  # where the last block, shorter than the others, was drawn, its packet is not full
        room.rest[: tail.numel()] = tail

    def decode(self, packet: Tensor, out: Tensor, seed: int, *, add: bool = False) -> None:
        if not add:
            out.zero_()
        room, tail = self._cut(out, packet, seed)
        room.blocks.index_add_(0, room.drawn, room.packed)
        tail += room.rest[: tail.numel()]

    def _cut(self, flat: Tensor, packet: Tensor, seed: int) -> tuple[_Room, Tensor]:
        """What was drawn as views: whole blocks with their places, and the shorter last one, empty if not drawn."""
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


class ScaledRandomBlock(RandomBlock):
    """Multiplies what it keeps by the number of blocks over those kept: the mean over draws is the gradient."""

    unbiased: ClassVar[bool] = True
    may_overflow: ClassVar[bool] = True

    def contraction(self, num_elements: int) -> float | None:
        return None

    def encode(self, values: Tensor, packet: Tensor, seed: int) -> None:
        super().encode(values, packet, seed)
        blocks, kept = self._counts(values.numel())
        packet.view(torch.float32).mul_(blocks / kept)
