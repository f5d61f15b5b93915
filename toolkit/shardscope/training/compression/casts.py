"""Half-precision floats: two bytes a number, added up on the way.

torch's own bf16 hook refuses gloo, and its fp16 hook is this one. Values beyond the range of fp16 become infinite here;
who packs looks for that.
"""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from shardscope.training.compression.codec import Codec


class Cast(Codec):
    """Rounds to the nearest number of a short format.

    The range of fp16, and the coarseness of bf16 at the end of its own, make infinities of finite float32.
    """

    may_overflow: ClassVar[bool] = True

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype
        self.summable = dtype
        is_narrow = dtype == torch.float16
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
