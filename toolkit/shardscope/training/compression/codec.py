"""What a codec is: numbers to bytes and back, one rank's own business, without any exchange.

A codec packs float32 values into exactly `num_bytes` bytes, which is a function of their count alone: every rank knows
how much it will receive. Packets cross the wire as they are, so a number of 4 bits takes half a byte. What is random is
drawn from a seed: the same step of the same job draws the same numbers on every repetition.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar

import torch
from torch import Tensor


class Codec(ABC):
    """Base of all codecs. A subclass sets what it claims; the conformance class holds it to that."""

    summable: torch.dtype | None = None
    """The number format in which packets may be added up instead of unpacked, if they may."""
    unbiased: ClassVar[bool] = False
    """Whether the mean over seeds of what comes back is what went in."""
    shared_seed: ClassVar[bool] = False
    """Whether all ranks draw the same random numbers (those who keep the same elements must)."""
    may_overflow: ClassVar[bool] = False
    """Whether finite values may become infinite in a packet; who packs looks for that."""
    out_of_range: str = "lower the learning rate, or set feedback=True, with which nothing is multiplied"
    """What to do where finite values become infinite in a packet."""
    align: int = 1
    """Elements that belong together: a share of a bucket that is packed by itself is a multiple of it."""

    def contraction(self, num_elements: int) -> float | None:  # noqa: ARG002
        """Delta with |x - back(x)|^2 <= (1 - delta) |x|^2 for every x (in the mean, if random); None if not claimed."""
        return None

    def begin_step(self, step: int) -> None:
        """Called before the first bucket of a step, for codecs whose settings move; the same on all ranks."""

    def prepare(self) -> None:
        """Called once, before the first step: what takes its time on first use is better done now."""

    @abstractmethod
    def num_bytes(self, num_elements: int) -> int:
        """Of the packet of so many values."""

    @abstractmethod
    def encode(self, values: Tensor, packet: Tensor, seed: int) -> None:
        """Pack finite float32 `values`, flat, into the uint8 `packet` of `num_bytes` bytes."""

    @abstractmethod
    def decode(self, packet: Tensor, out: Tensor, seed: int, *, add: bool = False) -> None:
        """Unpack into `out`, float32 and flat; with `add`, add to what is there.

        `seed` is the one that the packet was made with.
        """

    def subtract(self, packet: Tensor, values: Tensor, seed: int) -> None:
        """Subtract from `values` what of them is in the packet: what remains is what the packet leaves out."""
        back = torch.empty_like(values)
        self.decode(packet, back, seed)
        values.sub_(back)
