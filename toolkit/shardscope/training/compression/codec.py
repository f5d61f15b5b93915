"""Codecs: encode float32 values as bytes and decode them, on one rank and without communication.

A codec packs float32 values into a packet of exactly `num_bytes` bytes. The size depends only on the number of values,
so every rank can compute how much it will receive. Packets are sent without conversion, so a 4-bit number takes half a
byte. Random numbers are generated from a seed, so repeating a step of a job draws the same numbers.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import ClassVar

import torch
from torch import Tensor

from shardscope.errors import SpecError


class Codec(ABC):
    """Base class of all codecs.

    A subclass declares its properties in the attributes below; the conformance tests check that they are true.
    """

    summable: torch.dtype | None = None
    """Dtype in which packets can be summed without unpacking them; None if they cannot be summed."""
    unbiased: ClassVar[bool] = False
    """Whether decoding is unbiased: the mean over seeds of the decoded values equals the input."""
    shared_seed: ClassVar[bool] = False
    """Whether all ranks draw the same random numbers (needed, for example, if all must select the same elements)."""
    may_overflow: ClassVar[bool] = False
    """Whether finite values may become infinite in a packet; if so, the caller checks the decoded values."""
    out_of_range: str = "lower the learning rate, or set feedback=True, which turns off the scaling of values"
    """Advice in the error message for finite values that became infinite in a packet."""
    align: int = 1
    """Block size in elements. If shares of a bucket are packed separately, their size is a multiple of this."""
    is_compiled: bool = False
    """Whether the codec runs compiled loops."""

    def contraction(self, num_elements: int) -> float | None:  # noqa: ARG002
        """Return the contraction factor delta of the codec, or None if the codec does not guarantee one.

        Let C(x) be the decoded packet of x. Then every x satisfies |x - C(x)|^2 <= (1 - delta) |x|^2; for a random
        codec, this holds in expectation (Karimireddy et al. 2019, "Error Feedback Fixes SignSGD").
        """
        return None

    def begin_step(self, step: int) -> None:
        """Update settings that change with the step; called on all ranks before the first bucket of a step."""

    def prepare(self) -> None:
        """Do work that is slow on first use in advance, such as compiling; called once, before the first step."""

    @abstractmethod
    def num_bytes(self, num_elements: int) -> int:
        """Return the size in bytes of a packet with `num_elements` values."""

    @abstractmethod
    def encode(self, values: Tensor, packet: Tensor, seed: int) -> None:
        """Pack `values` into `packet`.

        Args:
            values: Flat tensor of finite float32 values; may be empty. Must not be modified, because error feedback
                needs the values later.
            packet: The output: a flat uint8 tensor of `num_bytes` bytes.
            seed: Seed for random numbers.
        """

    @abstractmethod
    def decode(self, packet: Tensor, out: Tensor, seed: int, *, add: bool = False) -> None:
        """Unpack `packet` into `out`.

        Args:
            packet: A packet made by `encode`.
            out: The output: a flat float32 tensor.
            seed: The seed with which the packet was encoded.
            add: Whether to add the decoded values to `out` instead of overwriting it.
        """

    def subtract(self, packet: Tensor, values: Tensor, seed: int) -> None:
        """Subtract the decoded `packet` from `values` in place, so that `values` becomes the residual."""
        back = torch.empty_like(values)
        self.decode(packet, back, seed)
        values.sub_(back)


class SimpleCodec(Codec):
    """Codec made from a packing and an unpacking function, for user-defined methods.

    `pack` and `unpack` are not called for an empty tensor.

    Args:
        num_bytes: Function from the number of values to the packet size in bytes, such as a method's `packet_bytes`.
        pack: Function from a flat float32 tensor to a tensor of any dtype, whose bytes become the packet.
        unpack: Function from a packet (a flat uint8 tensor) and the number of values to a flat float32 tensor.

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
                f"pack returned {made.numel()} bytes for {values.numel()} values, but packet_bytes returned "
                f"{packet.numel()}; make the two sizes equal"
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
