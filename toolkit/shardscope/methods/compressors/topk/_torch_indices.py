"""Compact encoding of the indices of k out of n elements, with a fixed packet size.

The packet size depends only on n and k, not on the indices, which rules out entropy coding. Instead, indices use
Elias-Fano coding (Elias 1974; Fano 1971): they are sorted, and the low bits of each index are written directly. The
high bits of all indices are written together in unary, as a row of k + n/2**low_bits bits. If at most a tenth of the
elements is kept, this takes at most 0.65 bits per index more than the minimum, which is log2 of the number of possible
choices of k from n elements, divided by k. If more than about a quarter is kept, a bitmap of n bits is shorter. If all
elements are kept, nothing is written.

If 1 % of 25 million elements are kept, an index takes 8.56 bits, and the minimum is 8.08. For comparison: 16-bit
offsets within segments take 16.03 bits, indices of fixed width 25, and the int32 indices of other implementations 32.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from shardscope.methods.compressors.topk._torch_loops import Loops

Bytes = npt.NDArray[np.uint8]
Indices = npt.NDArray[np.int64]


@dataclass(frozen=True)
class IndexFormat:
    """Format in which the indices of `kept` out of `num_elements` elements are encoded.

    Attributes:
        num_elements: Number of elements.
        kept: Number of indices to encode.
        low_bits: Number of low bits of each index that are written directly; None for a bitmap.
    """

    num_elements: int
    kept: int
    low_bits: int | None

    @property
    def low_bytes(self) -> int:
        """Size of the first part, which holds the low bits, in bytes."""
        return 0 if self.low_bits is None else -(-self.kept * self.low_bits // 8)

    @property
    def high_bits(self) -> int:
        """Size of the second part, which holds the unary high bits or the bitmap, in bits."""
        if self.low_bits is None:
            return self.num_elements
        return self.kept + (self.num_elements - 1 >> self.low_bits)

    @property
    def num_bytes(self) -> int:
        """Total size of the encoded indices, in bytes."""
        if self.kept == self.num_elements:
            return 0
        return self.low_bytes + -(-self.high_bits // 8)

    def write(self, indices: Tensor, out: Tensor, loops: Loops | None) -> None:
        """Encode ascending int64 `indices` into the uint8 tensor `out`, with compiled loops unless `loops` is None."""
        if not self.num_bytes:
            return
        low, high = out[: self.low_bytes].numpy(), out[self.low_bytes :].numpy()
        if loops is not None:
            out.zero_()
            loops.write(indices.numpy(), -1 if self.low_bits is None else self.low_bits, low, high)
        elif self.low_bits is None:
            high[:] = _bits(indices.numpy(), self.num_elements)
        else:
            low[:] = _fields(indices.numpy(), self.low_bits)
            steps = (indices.numpy() >> self.low_bits) + np.arange(self.kept)
            high[:] = _bits(steps, self.high_bits)

    def read(self, packed: Tensor, loops: Loops | None) -> Tensor:
        """Decode the indices, and return them as an int64 tensor in ascending order."""
        if not self.num_bytes:
            return torch.arange(self.num_elements)
        low, high = packed[: self.low_bytes].numpy(), packed[self.low_bytes :].numpy()
        if loops is not None:
            indices = np.empty(self.kept, dtype=np.int64)
            loops.read(low, high, -1 if self.low_bits is None else self.low_bits, indices)
            return torch.from_numpy(indices)
        places = np.flatnonzero(np.unpackbits(high, count=self.high_bits, bitorder="little"))
        if self.low_bits is None:
            return torch.from_numpy(places)
        tops = places - np.arange(self.kept) << self.low_bits
        return torch.from_numpy(tops | _from_fields(low, self.kept, self.low_bits))


@lru_cache(maxsize=256)
def index_format(num_elements: int, kept: int) -> IndexFormat:
    """Return the shortest format for the indices of `kept` out of `num_elements` elements."""
    widths = [None, *range(num_elements.bit_length())]
    formats = [IndexFormat(num_elements, kept, low_bits) for low_bits in widths]
    return min(formats, key=lambda format_: format_.num_bytes)


def _bits(places: Indices, count: int) -> Bytes:
    """Pack a row of `count` bits with the bits at `places` set; each byte is filled from its lowest bit."""
    row = np.zeros(count, dtype=np.uint8)
    row[places] = 1
    return np.packbits(row, bitorder="little")


def _fields(numbers: Indices, width: int) -> Bytes:
    """Pack the lowest `width` bits of each number, one number after another."""
    bits = (numbers[:, None] >> np.arange(width) & 1).astype(np.uint8)
    return np.packbits(bits, bitorder="little")


def _from_fields(packed: Bytes, count: int, width: int) -> Indices:
    bits = np.unpackbits(packed, count=count * width, bitorder="little").reshape(count, width)
    numbers: Indices = bits.astype(np.int64) @ (1 << np.arange(width))
    return numbers
