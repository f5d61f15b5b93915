"""Codec for fp16 and bf16: two bytes per number, and packets that an all-reduce can sum directly.

PyTorch's communication hook for bf16 does not support gloo, and its fp16 hook does the same as this codec. Values
beyond the range of the dtype become infinite in a packet, and the caller checks for infinities.
"""

from __future__ import annotations

from typing import ClassVar, Literal

import torch
from torch import Tensor

from shardscope.training.compression.codec import Codec


class Cast(Codec):
    """Codec that rounds each element to the nearest number of a 16-bit dtype.

    Finite float32 values may become infinite: fp16 has a small range, and bf16 rounds the largest float32 values up to
    infinity.

    Args:
        name: Name of the dtype, ``float16`` or ``bfloat16``.
    """

    may_overflow: ClassVar[bool] = True

    def __init__(self, name: Literal["float16", "bfloat16"]) -> None:
        self.dtype: torch.dtype = getattr(torch, name)
        self.summable = self.dtype
        is_narrow = self.dtype == torch.float16
        self.out_of_range = "use compression='bf16'" if is_narrow else "lower the learning rate"

    def num_bytes(self, num_elements: int) -> int:
        return num_elements * self.dtype.itemsize

    def encode(self, values: Tensor, packet: Tensor, seed: int) -> None:  # noqa: ARG002
        packet.view(self.dtype).copy_(values)

    def decode(self, packet: Tensor, out: Tensor, seed: int, *, add: bool = False) -> None:  # noqa: ARG002
        values = packet.view(self.dtype)
        if add:
            out.add_(values)
        else:
            out.copy_(values)

    def subtract(self, packet: Tensor, values: Tensor, seed: int) -> None:  # noqa: ARG002
        values.sub_(packet.view(self.dtype))
