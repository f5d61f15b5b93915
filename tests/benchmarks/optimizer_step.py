"""One optimizer step on the shapes of a 25 M parameter GPT, against torch's fused AdamW.

Run it as ``python tests/benchmarks/optimizer_step.py [threads ...]``; each thread count is measured by itself.
"""

from __future__ import annotations

import sys

import pytorch_optimizer
import torch
from _report import compare
from torch import nn

from shardscope.methods.optimizers.lamb._torch import TorchLamb
from shardscope.methods.optimizers.lars._torch import TorchLars

HIDDEN, LAYERS, VOCAB, CONTEXT = 512, 8, 256, 256


def gpt_parameters() -> list[nn.Parameter]:
    """76 tensors, 25.5 M elements, each with a gradient."""
    h = HIDDEN
    block = [(h,), (h,), (3 * h, h), (3 * h,), (h, h), (h,), (4 * h, h), (4 * h,), (h, 4 * h)]
    shapes = [(VOCAB, h), (CONTEXT, h), *block * LAYERS, (h,), (h,)]
    params = [nn.Parameter(0.02 * torch.randn(shape)) for shape in shapes]
    for param in params:
        param.grad = 0.01 * torch.randn_like(param)
    return params


def optimizers() -> dict[str, torch.optim.Optimizer]:
    lr = 1e-4
    return {
        "AdamW fused": torch.optim.AdamW(gpt_parameters(), lr=lr, fused=True),
        "Lamb": TorchLamb(gpt_parameters(), lr),
        "Lamb, clipped": TorchLamb(gpt_parameters(), lr, max_grad_norm=1.0),
        "Lamb, one reduction": TorchLamb(gpt_parameters(), lr, reduce_squares=lambda squares: squares),
        "Lamb, fused": TorchLamb(gpt_parameters(), lr, form="fused"),
        "Lamb, fused, clipped": TorchLamb(gpt_parameters(), lr, form="fused", max_grad_norm=1.0),
        "Lamb, plain": TorchLamb(gpt_parameters(), lr, form="plain"),
        "pytorch_optimizer Lamb": pytorch_optimizer.Lamb(gpt_parameters(), lr),
        "pytorch_optimizer Lamb, loop": pytorch_optimizer.Lamb(gpt_parameters(), lr, foreach=False),
        "Lars": TorchLars(gpt_parameters(), lr),
        "pytorch_optimizer LARS, loop": pytorch_optimizer.LARS(gpt_parameters(), lr, foreach=False),
    }


def main() -> None:
    for threads in [int(count) for count in sys.argv[1:]] or [1, 2]:
        torch.set_num_threads(threads)
        print(f"\n{threads} thread{'s' * (threads > 1)}")
        steps = {name: optimizer.step for name, optimizer in optimizers().items()}
        compare(steps, rounds=25, baseline="AdamW fused")


if __name__ == "__main__":
    main()
