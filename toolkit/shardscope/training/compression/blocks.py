"""Integers in blocks: 8 or 4 bits a number, and one float32 scale a block.

A block's scale is its largest magnitude over the largest integer, so a single outlier costs the precision of its own
block only (Dettmers et al. 2022, 8-bit optimizers via block-wise quantization).
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from shardscope.training.compression.codec import Codec

_SCALE_BYTES = 4


class BlockInt(Codec):
    """Rounds to the nearest of 2**bits - 1 equidistant values, symmetric about zero. bits: 8 or 4."""

    def __init__(self, bits: int, block: int) -> None:
        self.bits, self.align = bits, block
        self.largest = 2 ** (bits - 1) - 1

    def _blocks(self, num_elements: int) -> int:
        return -(-num_elements // self.align)

    def num_bytes(self, num_elements: int) -> int:
        return self._blocks(num_elements) * _SCALE_BYTES + -(-num_elements * self.bits // 8)

    def _parts(self, packet: Tensor, num_elements: int) -> tuple[Tensor, Tensor]:
        """Scales and integers of a packet, as views."""
        head = self._blocks(num_elements) * _SCALE_BYTES
        return packet[:head].view(torch.float32), packet[head:]

    def encode(self, values: Tensor, packet: Tensor, seed: int) -> None:  # noqa: ARG002
        count = values.numel()
        scales, codes = self._parts(packet, count)
        rows = pad(values, (0, self._blocks(count) * self.align - count)).view(-1, self.align)
        torch.amax(rows.abs(), dim=1, out=scales)
        scales.div_(self.largest)
        inverse = torch.where(scales > 0, scales.reciprocal(), 0.0)
        integers = rows.mul(inverse[:, None]).round_().clamp_(-self.largest, self.largest).view(-1)[:count]
        if self.bits == 8:
            codes.view(torch.int8).copy_(integers)
        else:
            _pack_nibbles(integers, codes, self.largest)

    def decode(self, packet: Tensor, out: Tensor, seed: int, *, add: bool = False) -> None:  # noqa: ARG002
        count = out.numel()
        scales, codes = self._parts(packet, count)
        integers = (
            codes.view(torch.int8).float() if self.bits == 8 else _unpack_nibbles(codes, count, self.largest)
        )
        rows = pad(integers, (0, self._blocks(count) * self.align - count)).view(-1, self.align)
        values = rows.mul_(scales[:, None]).view(-1)[:count]
        if add:
            out.add_(values)
        else:
            out.copy_(values)


def _pack_nibbles(integers: Tensor, codes: Tensor, largest: int) -> None:
    """Two a byte, shifted to be positive; an odd last one has the low half of a byte of its own."""
    shifted = (integers + largest).to(torch.uint8)
    codes.copy_(shifted[0::2])
    odd = shifted[1::2]
    codes[: odd.numel()] |= odd << 4


def _unpack_nibbles(codes: Tensor, count: int, largest: int) -> Tensor:
    pairs = torch.stack([codes & 15, codes >> 4], dim=1).view(-1)[:count]
    return pairs.float() - largest
