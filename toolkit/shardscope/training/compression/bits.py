"""Small integers packed at their own width: element k of a stream takes bits ``k * bits`` to ``(k + 1) * bits - 1``.

Bytes are filled from their low end. Eight elements always take `bits` whole bytes, so a stream can be cut after any
multiple of eight. `loops.pack` writes the same bytes.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad


def packed_size(num_elements: int, bits: int) -> int:
    """Bytes that `num_elements` elements take."""
    return -(-num_elements * bits // 8)


def pack_bits(codes: Tensor, bits: int, packed: Tensor) -> None:
    """Pack uint8 `codes`, flat, each below ``2**bits``, into the uint8 `packed` of `packed_size` bytes."""
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
    """The first `count` codes, uint8."""
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
    """Pack elements of 2 or 4 bits, which fill bytes exactly."""
    columns = _eights(codes).view(-1, 8 // bits)
    packed = columns[:, 0].clone()
    for k in range(1, columns.shape[1]):
        packed |= columns[:, k] << (k * bits)
    return packed[: packed_size(codes.numel(), bits)]


def _eights(codes: Tensor) -> Tensor:
    """Rows of eight, the last padded with zeros."""
    missing = -codes.numel() % 8
    return (pad(codes, (0, missing)) if missing else codes).view(-1, 8)


def _shifts(bits: int) -> Tensor:
    return torch.arange(0, 8 * bits, bits)
