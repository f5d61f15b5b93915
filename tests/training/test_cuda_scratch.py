"""Memory of CUDA kernels beside their results: the rules against what an H100 recorded (torch 2.11, cuDNN 9.19)."""

from __future__ import annotations

import pytest
import torch
from torch.nn.functional import linear, scaled_dot_product_attention
from torch.utils._python_dispatch import TorchDispatchMode

from shardscope.training.cuda_scratch import scratch_bytes


class Largest(TorchDispatchMode):
    """Keeps the most bytes that an operation takes."""

    found = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        results = func(*args, **(kwargs or {}))
        self.found = max(self.found, scratch_bytes(func, args, results))
        return results


@pytest.mark.parametrize(
    ("rows", "width", "recorded"), [(8192, 1280, 83_886_080), (8192, 320, 20_971_520), (512, 1280, 0)]
)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_the_gradient_of_a_bias_takes_partial_sums(
    rows: int, width: int, recorded: int, dtype: torch.dtype
) -> None:
    bias = torch.zeros(width, dtype=dtype, requires_grad=True)
    output = linear(torch.zeros(rows, 1, dtype=dtype), torch.zeros(width, 1, dtype=dtype), bias)
    with Largest() as seen:
        output.backward(torch.ones_like(output))
    assert seen.found == recorded


@pytest.mark.parametrize(
    ("shape", "dtype", "recorded"),
    [
        ((32, 8, 256, 40), torch.bfloat16, 10_748_160), ((32, 8, 256, 64), torch.bfloat16, 17_039_616),
        ((256, 4, 64, 16), torch.bfloat16, 4_456_704), ((32, 8, 256, 40), torch.float32, 17_055_744),
    ],
)  # fmt: skip
def test_the_backward_pass_of_attention_accumulates_in_float32(
    shape: tuple[int, ...], dtype: torch.dtype, recorded: int
) -> None:
    inputs = [torch.zeros(shape, dtype=dtype, requires_grad=True) for _ in range(3)]
    output = scaled_dot_product_attention(*inputs, is_causal=True)
    with Largest() as seen:
        output.backward(torch.ones_like(output))
    assert seen.found == pytest.approx(recorded, rel=2e-3)
