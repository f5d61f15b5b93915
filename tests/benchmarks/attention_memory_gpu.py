"""Memory that attention takes on a GPU beside its results, which no trace on the CPU shows.

    python tests/benchmarks/attention_memory_gpu.py

Queries, keys and values are views of one tensor, as in the toolkit's GPT. "kept" is what the forward pass leaves in
memory beside its output, of which the log-sum-exp of each row is known; "forward" and "backward" are the peaks of the
passes beside what they return, both in bytes for each row (token) of each head, where that is a round number the cause
is easily guessed. The last line of each block is the library that torch chooses by itself.

Then a job's steps are traced by torch's own record: the largest groups of blocks that are allocated at the peak.
"""

from __future__ import annotations

import gc
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

sys.path.insert(0, str(Path(__file__).parents[1]))

import shardscope as ss
from shardscope.runlog.writer import EventWriter
from shardscope.training.context import RankContext
from shardscope.training.meter import Meter
from shardscope.training.trainer import Trainer

BACKENDS = {
    "cudnn": [SDPBackend.CUDNN_ATTENTION],
    "flash": [SDPBackend.FLASH_ATTENTION],
    "efficient": [SDPBackend.EFFICIENT_ATTENTION],
    "chosen": None,
}
SHAPES = (  # batch, heads, rows, head size
    (32, 8, 256, 40),
    (32, 8, 256, 32),
    (32, 8, 256, 64),
    (32, 8, 256, 128),
    (32, 8, 64, 40),
    (32, 8, 512, 40),
    (32, 8, 1024, 64),
    (8, 16, 1024, 64),
    (2, 12, 1024, 64),
    (256, 4, 64, 16),
    (4, 16, 2048, 128),
    (3, 5, 333, 72),
)
"""The first is that of gpt-small with 32 samples."""


def allocated() -> int:
    """Bytes that tensors ask for, without the allocator's rounding."""
    return int(torch.cuda.memory_stats()["requested_bytes.all.current"])


def peak() -> int:
    """Their maximum since the last reset."""
    return int(torch.cuda.memory_stats()["requested_bytes.all.peak"])


def fresh() -> int:
    """Free what can be freed, and begin to measure a peak; returns the present bytes."""
    torch.cuda.synchronize()
    gc.collect()
    torch.cuda.reset_peak_memory_stats()
    return allocated()


def used(shape: tuple[int, int, int, int], dtype: torch.dtype) -> tuple[int, int, int]:
    """Bytes that the forward pass keeps, and the peaks of both passes, beside the output and the gradients."""
    batch, heads, rows, size = shape
    packed = torch.randn(batch, rows, 3 * heads * size, device="cuda", dtype=dtype, requires_grad=True)
    query, key, value = packed.detach().unflatten(-1, (3, heads, -1)).permute(2, 0, 3, 1, 4)
    inputs = [tensor.requires_grad_() for tensor in (query, key, value)]
    found = (0, 0, 0)
    for _ in range(2):  # the first one loads kernels
        before = fresh()
        output = scaled_dot_product_attention(*inputs, is_causal=True)
        torch.cuda.synchronize()
        kept, top = allocated() - before - output.nbytes, peak() - before - output.nbytes
        gradient = torch.randn_like(output.transpose(1, 2).contiguous()).transpose(1, 2)
        before = fresh()
        gradients = torch.autograd.grad(output, inputs, gradient)
        torch.cuda.synchronize()
        found = kept, top, peak() - before - sum(each.nbytes for each in gradients)
        del output, gradient, gradients
    return found


def shapes() -> None:
    """Print what attention takes, for each shape, dtype and library."""
    print(
        f"{'shape':<22}{'dtype':<10}{'library':<11}{'kept':>9}{'forward':>10}{'backward':>10}   bytes a row of a head"
    )
    for shape in SHAPES:
        for dtype in (torch.bfloat16, torch.float32):
            for name, backend in BACKENDS.items():
                if dtype == torch.float32 and name in {"cudnn", "flash"}:
                    continue
                try:
                    if backend is None:
                        found = used(shape, dtype)
                    else:
                        with sdpa_kernel(backend):
                            found = used(shape, dtype)
                except RuntimeError as error:
                    print(f"{shape!s:<22}{str(dtype)[6:]:<10}{name:<11}{str(error).splitlines()[0][:70]}")
                    continue
                kept, forward, backward = (each / (shape[0] * shape[1] * shape[2]) for each in found)
                print(
                    f"{shape!s:<22}{str(dtype)[6:]:<10}{name:<11}{kept:>9.2f}{forward:>10.2f}{backward:>10.2f}",
                    f"{found[2]:>14,} B" + " causal, as chosen" * (name == "chosen"), flush=True,
                )  # fmt: skip


def of_job(precision: str) -> None:
    """Print the blocks at the peak of a job's steps, by size and by where they were allocated."""
    job = ss.Job(
        model="gpt-small", data="python-source", strategy="single", batch=32, steps=10**6, precision=precision,
    )  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        context = RankContext(
            0, 1, torch.device("cuda", 0), Meter(), EventWriter(Path(folder) / "rank-0.jsonl", 0)
        )
        trainer = Trainer(job, context, Path(folder))
        try:
            trainer.take_step(1)
            fresh()
            base = torch.cuda.memory_allocated()
            torch.cuda.memory._record_memory_history(context=None)
            trainer.take_step(2)
            events: list[dict[str, Any]] = torch.cuda.memory._snapshot()["device_traces"][0]
            torch.cuda.memory._record_memory_history(enabled=None)
        finally:
            if trainer.loader is not None:
                trainer.loader.close()
            context.events.close()
    live: dict[int, int] = {}
    now, top, at = base, 0, 0
    for number, event in enumerate(events):
        if event["action"] == "alloc":
            live[event["addr"]] = event["size"]
            now += event["size"]
        elif event["action"] == "free_completed":
            now -= live.pop(event["addr"], 0) or event["size"]
        if now > top:
            top, at, then = now, number, Counter(live.values())
    print(
        f"\n{precision}: peak {torch.cuda.max_memory_allocated():,} B allocated, {peak():,} B requested; {base:,} B "
        f"before the step, {top:,} B at event {at} of {len(events)}; blocks of the step at that moment:"
    )
    for size, count in sorted(then.items(), key=lambda row: -row[0] * row[1])[:14]:
        print(f"{size:>14,} B  x {count:>4}  {size * count:>14,} B")
    near = [
        (e["action"], e["size"])
        for e in events[at - 25 : at + 25]
        if e["action"] in {"alloc", "free_completed"}
    ]
    print(" ".join(("+" if action == "alloc" else "-") + f"{size:,}" for action, size in near))


if __name__ == "__main__":
    print(
        f"{torch.cuda.get_device_name()}, torch {torch.__version__}, cuDNN {torch.backends.cudnn.version()}"
    )
    for precision in ("bf16-mixed", "fp32"):
        of_job(precision)
    print()
    shapes()
