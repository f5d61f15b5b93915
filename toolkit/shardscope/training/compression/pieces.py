"""Base classes for codecs that process a tensor piece by piece, by compiled loops (numba) or in plain torch.

Both versions write the same bytes. In plain torch, a tensor is split into pieces small enough to stay in a core's cache
from one torch operation to the next; otherwise each operation would read the whole tensor from memory. A compiled loop
does all operations on an element at once, and runs on several threads.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor

from shardscope.training.compression.bits import pack_bits, packed_size, unpack_bits
from shardscope.training.compression.codec import Codec
from shardscope.training.compression.noise import Keys, keys_of
from shardscope.training.compression.route import choose_route, share_out

PIECE = 1 << 16
"""Approximate number of elements per piece in plain torch (256 KiB of float32), and the minimum per thread of a loop.
"""
CHUNK = 4096
"""Number of elements per group in compiled loops, for codecs without blocks."""
SET, ADD, SUBTRACT = 0, 1, 2
"""Modes of unpacking: overwrite the output with the decoded values, add them to it, or subtract them from it."""


class PieceCodec(Codec):
    """Base class that chooses between compiled loops and plain torch.

    A subclass defines one method, `unpack`, for all three modes of unpacking.
    """

    def __init__(self) -> None:
        self.is_compiled = choose_route() == "numba"

    def decode(self, packet: Tensor, out: Tensor, seed: int, *, add: bool = False) -> None:  # noqa: ARG002
        self.unpack(packet, out, ADD if add else SET)

    def subtract(self, packet: Tensor, values: Tensor, seed: int) -> None:  # noqa: ARG002
        self.unpack(packet, values, SUBTRACT)

    def prepare(self) -> None:
        if self.is_compiled:  # loops compile when they first run
            values, packet = torch.zeros(8), torch.zeros(self.num_bytes(8), dtype=torch.uint8)
            self.encode(values, packet, 0)
            self.unpack(packet, values, SET)

    @abstractmethod
    def unpack(self, packet: Tensor, out: Tensor, mode: int) -> None:
        """Unpack `packet` into `out` by `mode`, which is `SET`, `ADD` or `SUBTRACT`.

        There is no seed: these codecs draw random numbers only to encode.
        """


class CodeCodec(PieceCodec):
    """Base class of codecs whose packet is a header of float32 scales, then an integer code for each element.

    Args:
        bits: Bits per code, 1 to 8.
        grain: Each piece begins at a multiple of this number of elements; must be a multiple of 8.
    """

    def __init__(self, bits: int, grain: int = 8) -> None:
        super().__init__()
        self.is_compiled = self.is_compiled and self._has_loops()
        self.bits, self._grain = bits, grain

    @abstractmethod
    def num_scales(self, num_elements: int) -> int:
        """Return the number of scales in a packet with `num_elements` values."""

    def num_bytes(self, num_elements: int) -> int:
        return 4 * self.num_scales(num_elements) + packed_size(num_elements, self.bits)

    def _parts(self, packet: Tensor, num_elements: int) -> tuple[Tensor, Tensor]:
        """Return views of the scales and of the packed codes in a packet."""
        head = 4 * self.num_scales(num_elements)
        return packet[:head].view(torch.float32), packet[head:]

    def encode(self, values: Tensor, packet: Tensor, seed: int) -> None:
        scales, packed = self._parts(packet, values.numel())
        encode = self.encode_compiled if self.is_compiled else self._encode_plain
        encode(values, scales, packed, keys_of(seed))

    def unpack(self, packet: Tensor, out: Tensor, mode: int) -> None:
        scales, packed = self._parts(packet, out.numel())
        unpack = self.unpack_compiled if self.is_compiled else self._unpack_plain
        unpack(scales, packed, out, mode)

    # In plain torch.

    def _encode_plain(self, values: Tensor, scales: Tensor, packed: Tensor, keys: Keys) -> None:
        self.begin(values, scales)
        for start, stop in cuts(values.numel(), self._grain):
            codes = self.codes(values[start:stop], scales, keys, start)
            pack_bits(codes, self.bits, self._packed(packed, start, stop))

    def _unpack_plain(self, scales: Tensor, packed: Tensor, out: Tensor, mode: int) -> None:
        for start, stop in cuts(out.numel(), self._grain):
            codes = unpack_bits(self._packed(packed, start, stop), self.bits, stop - start)
            put(self.values(codes, scales, start), out[start:stop], mode)

    def _packed(self, packed: Tensor, start: int, stop: int) -> Tensor:
        return packed[start * self.bits // 8 : packed_size(stop, self.bits)]

    def begin(self, values: Tensor, scales: Tensor) -> None:
        """Compute, before any codes, the scales that depend on all values; by default there are none."""

    @abstractmethod
    def codes(self, values: Tensor, scales: Tensor, keys: Keys, start: int) -> Tensor:
        """Return the codes for one piece of the tensor, as a flat uint8 tensor.

        Args:
            values: The values of the piece, flat.
            scales: The scales of the whole packet; this method may write those of the piece.
            keys: Keys for random numbers.
            start: Index in the tensor of the first element of the piece.
        """

    @abstractmethod
    def values(self, codes: Tensor, scales: Tensor, start: int) -> Tensor:
        """Return the values of one piece, decoded from its codes, as a flat float32 tensor."""

    # Compiled. A subclass that overrides neither `encode_compiled` nor `unpack_compiled` runs in plain torch.

    @classmethod
    def _has_loops(cls) -> bool:
        encodes = cls.encode_compiled is not CodeCodec.encode_compiled
        return encodes or cls.unpack_compiled is not CodeCodec.unpack_compiled

    def encode_compiled(self, values: Tensor, scales: Tensor, packed: Tensor, keys: Keys) -> None:
        """Encode all values; a subclass overrides this with a compiled loop that writes the same bytes."""
        self._encode_plain(values, scales, packed, keys)

    def unpack_compiled(self, scales: Tensor, packed: Tensor, out: Tensor, mode: int) -> None:
        """Unpack all values; a subclass overrides this with a compiled loop that gives the same values."""
        self._unpack_plain(scales, packed, out, mode)


def cuts(num_elements: int, align: int = 8) -> Iterator[tuple[int, int]]:
    """Yield the start and stop index of each piece of a tensor; each piece begins at a multiple of `align`."""
    size = max(1, PIECE // align) * align
    for start in range(0, num_elements, size):
        yield start, min(start + size, num_elements)


def over_blocks(loop: Callable[..., None], block: int, count: int, *arguments: Any) -> None:
    """Run a compiled loop over all blocks of a tensor, on as many threads as torch uses.

    Args:
        loop: The compiled loop; called with `arguments`, and with the first and stop block of one thread.
        block: Elements per block.
        count: Elements of the tensor.
        arguments: Leading arguments of the loop; tensors are passed as NumPy arrays.
    """
    arrays = [each.detach().numpy() if isinstance(each, Tensor) else each for each in arguments]
    share_out(loop, arrays, count=-(-count // block), at_least=max(1, PIECE // block))


def words_of(values: Tensor) -> Tensor:
    """Return a view of float32 values as int32: the bits of each float."""
    return values.view(torch.int32)


def as_words(keys: Keys) -> tuple[np.uint32, np.uint32]:
    """Convert keys to the NumPy integers that compiled loops take."""
    return np.uint32(keys[0]), np.uint32(keys[1])


def put(values: Tensor, out: Tensor, mode: int) -> None:
    """Overwrite `out` with `values`, or add or subtract them, by `mode` (`SET`, `ADD` or `SUBTRACT`)."""
    if mode == SET:
        out.copy_(values)
    else:
        out.add_(values, alpha=1 if mode == ADD else -1)
