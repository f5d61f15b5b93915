"""Packing of integers of 1 to 8 bits without gaps: element k occupies bits ``k * bits`` to ``(k + 1) * bits - 1``.

Each byte is filled from its least significant bit. Eight elements always take `bits` whole bytes, so packed data can
be split after any multiple of eight elements. `loops.pack` is the compiled version, and writes the same bytes.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad


def packed_size(num_elements: int, bits: int) -> int:
    """Return the size in bytes of `num_elements` packed integers of `bits` bits each, rounded up."""
    return -(-num_elements * bits // 8)


def pack_bits(codes: Tensor, bits: int, packed: Tensor) -> None:
    """Pack integers into a tensor of bytes.

    Args:
        codes: The integers, each below ``2**bits``: a flat uint8 tensor.
        bits: Bits per integer, 1 to 8.
        packed: The output: a flat uint8 tensor of `packed_size` bytes.
    """
    if bits == 8:
        packed.copy_(codes)
    elif bits == 1:
        packed.copy_(torch.from_numpy(np.packbits(codes.numpy(), bitorder="little")))
    elif 8 % bits == 0:
        packed.copy_(_in_bytes(codes, bits))
    else:
        words = (_eights(codes).long() << _shifts(bits)).sum(dim=1)
        packed.copy_(words.view(torch.uint8).view(-1, 8)[:, :bits].reshape(-1)[: packed.numel()])


def unpack_bits(packed: Tensor, bits: int, count: int) -> Tensor:
    """Unpack the first `count` integers of `bits` bits each; returns a flat uint8 tensor."""
    if bits == 8:
        return packed
    if bits == 1:
        return torch.from_numpy(np.unpackbits(packed.numpy(), count=count, bitorder="little"))
    mask = 2**bits - 1
    if 8 % bits == 0:
        return torch.stack([(packed >> k) & mask for k in range(0, 8, bits)], dim=1).view(-1)[:count]
    num_words = -(-count // 8)
    rows = pad(packed, (0, num_words * bits - packed.numel())).view(num_words, bits)
    words = pad(rows, (0, 8 - bits)).contiguous().view(torch.int64)
    codes: Tensor = (words >> _shifts(bits)) & mask
    return codes.to(torch.uint8).view(-1)[:count]


def _in_bytes(codes: Tensor, bits: int) -> Tensor:
    """Pack integers of 2 or 4 bits: a whole number of them fits in each byte."""
    columns = _eights(codes).view(-1, 8 // bits)
    packed = columns[:, 0].clone()
    for k in range(1, columns.shape[1]):
        packed |= columns[:, k] << (k * bits)
    return packed[: packed_size(codes.numel(), bits)]


def _eights(codes: Tensor) -> Tensor:
    """Reshape `codes` to rows of eight; the last row is padded with zeros."""
    missing = -codes.numel() % 8
    return (pad(codes, (0, missing)) if missing else codes).view(-1, 8)


def _shifts(bits: int) -> Tensor:
    return torch.arange(0, 8 * bits, bits)
