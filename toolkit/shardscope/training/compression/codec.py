"""Codecs: numbers to bytes and back on one rank, without any exchange.

A codec packs float32 values into exactly `num_bytes` bytes, a function of their count alone, so every rank can compute
how much it will receive. Packets cross the wire unchanged, so a number of 4 bits takes half a byte. Random numbers are
drawn from a seed: the same step of the same job draws the same numbers on every repetition.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import ClassVar

import torch
from torch import Tensor

from shardscope.errors import SpecError


class Codec(ABC):
    """Base class of all codecs. A subclass declares its properties, and the conformance tests check them."""

    summable: torch.dtype | None = None
    """Number format in which packets can be summed without unpacking; None if they cannot."""
    unbiased: ClassVar[bool] = False
    """Whether decoding is unbiased: the mean over seeds of the decoded values equals the input."""
    shared_seed: ClassVar[bool] = False
    """Whether all ranks draw the same random numbers (as they must to keep the same elements)."""
    may_overflow: ClassVar[bool] = False
    """Whether finite values may become infinite in a packet; the caller then checks for it."""
    out_of_range: str = "lower the learning rate, or set feedback=True, with which nothing is multiplied"
    """Advice for the user where finite values become infinite in a packet."""
    align: int = 1
    """Block size in elements: a share of a bucket that is packed separately is a multiple of it."""
    is_compiled: bool = False
    """Whether it runs compiled loops."""

    def contraction(self, num_elements: int) -> float | None:  # noqa: ARG002
        """Delta with |x - back(x)|^2 <= (1 - delta) |x|^2 for every x (in the mean, if random); None if not claimed."""
        return None

    def begin_step(self, step: int) -> None:
        """Called before the first bucket of a step, for codecs whose settings change; the same on all ranks."""

    def prepare(self) -> None:
        """Do work that is slow on first use, such as compiling; called once, before the first step."""

    @abstractmethod
    def num_bytes(self, num_elements: int) -> int:
        """Bytes of a packet with `num_elements` values."""

    @abstractmethod
    def encode(self, values: Tensor, packet: Tensor, seed: int) -> None:
        """Pack finite float32 `values`, flat, into the uint8 `packet` of `num_bytes` bytes.

        `values` may be empty. It is not modified: error feedback still needs it.
        """

    @abstractmethod
    def decode(self, packet: Tensor, out: Tensor, seed: int, *, add: bool = False) -> None:
        """Unpack into `out`, float32 and flat; with `add`, add to its values.

        `seed` is the one that the packet was made with.
        """

    def subtract(self, packet: Tensor, values: Tensor, seed: int) -> None:
        """Subtract the decoded packet from `values`, which leaves the residual."""
        back = torch.empty_like(values)
        self.decode(packet, back, seed)
        values.sub_(back)


class SimpleCodec(Codec):
    """A codec made of two functions, for user-defined methods. The functions are never called for zero values.

    Args:
        num_bytes: Maps the number of values to the bytes of a packet, such as a method's `packet_bytes`.
        pack: Maps float32 values, flat, to a tensor of any number format whose bytes are the packet.
        unpack: Maps a packet, a flat uint8 tensor, and its number of values to these values, float32 and flat.

    Example:
        >>> back = lambda packet, count: packet.view(torch.float16).float()
        >>> codec = SimpleCodec(lambda count: 2 * count, torch.Tensor.half, back)
        >>> packet = torch.empty(codec.num_bytes(3), dtype=torch.uint8)
        >>> codec.encode(torch.tensor([1.0, 2.0, 3.0]), packet, seed=0)
        >>> codec.decode(packet, out := torch.empty(3), seed=0); out.tolist()
        [1.0, 2.0, 3.0]
    """

    def __init__(
        self,
        num_bytes: Callable[[int], int],
        pack: Callable[[Tensor], Tensor],
        unpack: Callable[[Tensor, int], Tensor],
    ) -> None:
        self._num_bytes, self._pack, self._unpack = num_bytes, pack, unpack

    def num_bytes(self, num_elements: int) -> int:
        return self._num_bytes(num_elements)

    def encode(self, values: Tensor, packet: Tensor, seed: int) -> None:  # noqa: ARG002 - nothing is random
        if not values.numel():
            packet.zero_()
            return
        made = self._pack(values).contiguous().view(torch.uint8)
        if made.numel() != packet.numel():
            raise SpecError(
                f"pack makes {made.numel()} bytes of {values.numel()} values, and packet_bytes says {packet.numel()}; "
                "let them agree"
            )
        packet.copy_(made)

    def decode(self, packet: Tensor, out: Tensor, seed: int, *, add: bool = False) -> None:  # noqa: ARG002
        if not out.numel():
            return
        values = self._unpack(packet, out.numel())
        if add:
            out.add_(values)
        else:
            out.copy_(values)
