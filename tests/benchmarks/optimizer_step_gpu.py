"""One LAMB step on a GPU, by the Triton kernel and in torch's operations, against torch's fused AdamW.

Run it as ``python tests/benchmarks/optimizer_step_gpu.py``. Each step starts with a cold L2 cache. Two times are
measured with CUDA events: that of the device alone, with the step's launches queued behind other work; and that of a
step on an idle device, which includes the time that Python takes to launch it.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable

import torch
from torch import nn

from shardscope.methods.optimizers.lamb._torch import TorchLamb
from shardscope.training.optim.route import why_not_triton

ROUNDS = 15
FLUSH_BYTES = 256 << 20
"""More than the L2 cache of any GPU."""
BUSY_CYCLES = 40_000_000
"""Clock cycles that the device spins while Python launches a step: about 20 ms."""

Shapes = list[tuple[int, ...]]


def gpt2() -> Shapes:
    """GPT-2 small: 148 tensors, 124 M elements, from 768 to 38.6 M."""
    h = 768
    norm, block = [(h,), (h,)], [(3 * h, h), (3 * h,), (h, h), (h,)]
    feed_forward = [(4 * h, h), (4 * h,), (h, 4 * h), (h,)]
    return [(50257, h), (1024, h), *[*norm, *block, *norm, *feed_forward] * 12, *norm]


def many() -> Shapes:
    """300 tensors of 1,000 to 100,000 elements, 6.5 M in total."""
    return [(int(1000 * 100 ** (i / 299)),) for i in range(300)]


MODELS = {"GPT-2, 124 M": gpt2(), "12 x 1024 x 1024": [(1024, 1024)] * 12, "300 small tensors": many()}


def parameters(shapes: Shapes) -> list[nn.Parameter]:
    """Parameters on the GPU, each with a gradient."""
    params = [nn.Parameter(0.02 * torch.randn(shape, device="cuda")) for shape in shapes]
    for param in params:
        param.grad = 0.01 * torch.randn_like(param)
    return params


def optimizers(shapes: Shapes) -> dict[str, torch.optim.Optimizer]:
    return {
        "AdamW fused": torch.optim.AdamW(parameters(shapes), lr=1e-4, fused=True),
        "Lamb, kernel": TorchLamb(parameters(shapes), 1e-4, form="triton"),
        "Lamb, kernel, clipped": TorchLamb(parameters(shapes), 1e-4, form="triton", max_grad_norm=1.0),
        "Lamb, kernel, one reduction": TorchLamb(
            parameters(shapes), 1e-4, form="triton", reduce_squares=lambda squares: squares
        ),
        "Lamb, plain": TorchLamb(parameters(shapes), 1e-4, form="plain"),
    }


def milliseconds(step: Callable[[], object], flush: torch.Tensor, *, busy: bool) -> float:
    """The time of a step between two events on the device."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    flush.zero_()
    if busy:
        torch.cuda._sleep(BUSY_CYCLES)
    else:
        torch.cuda.synchronize()
    start.record()
    step()
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end)


def compare(steps: dict[str, Callable[[], object]], *, baseline: str, rounds: int = ROUNDS) -> None:
    """Time the steps interleaved, and print medians and ratios to the baseline of the same round."""
    flush = torch.empty(FLUSH_BYTES, dtype=torch.uint8, device="cuda")
    for step in [*steps.values()] * 3:
        step()
    times = {(name, busy): [] for name in steps for busy in (True, False)}
    for _ in range(rounds):
        for (name, busy), measured in times.items():
            measured.append(milliseconds(steps[name], flush, busy=busy))
    print(f"{'':<{max(map(len, steps))}}  {'device':>19}  {'step on idle device':>19}")
    for name in steps:
        cells = []
        for busy in (True, False):
            ratios = [a / b for a, b in zip(times[name, busy], times[baseline, busy], strict=True)]
            cells.append(f"{statistics.median(times[name, busy]):8.3f} ms {statistics.median(ratios):6.2f} x")
        print(f"{name:<{max(map(len, steps))}}  {'  '.join(cells)}")


def main() -> None:
    if reason := why_not_triton():
        print(f"Nothing to compare: {reason}.")
        return
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}; ratios to AdamW fused")
    for name, shapes in MODELS.items():
        print(f"\n{name}: {len(shapes)} tensors, {sum(map(math.prod, shapes)) / 1e6:.1f} M elements")
        compare({name: each.step for name, each in optimizers(shapes).items()}, baseline="AdamW fused")
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
