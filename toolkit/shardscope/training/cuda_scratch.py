"""Temporary memory (workspace) that torch's kernels allocate on GPUs, for traces on a machine without a GPU.

The workspace of two kernels is large enough to change the peak of a training step. The two rules below were compared
with recordings on an H100 (torch 2.11, cuDNN 9.19; tests/benchmarks/attention_memory_gpu.py); for sums and for cuDNN's
attention, they agree to the byte.

- The sum over the rows of a matrix, such as the gradient of a bias, is split among blocks of threads if there are many
  rows, and each thread leaves its float32 partial sums in memory (``setReduceConfig`` and ``global_memory_size`` in
  ``aten/src/ATen/native/cuda/Reduce.cuh``). For a layer's bias, this can be several times its activations.
- The backward pass of fused attention accumulates the gradient of the queries in float32, and keeps one float32 number
  for each query. This holds for cuDNN's kernel, which torch chooses for 16-bit types on Hopper and later. Flash
  attention, and the memory-efficient kernel that torch chooses for float32, also round the head size up to a multiple
  of 32 or 64.
"""

from __future__ import annotations

from math import prod
from typing import Any

import torch
from torch import Tensor

from shardscope.training.memory.ledger import Scratch

_ATTENTION = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default  # noqa: SLF001
_SUM = torch.ops.aten.sum.dim_IntList
_WARP, _MAX_THREADS, _LOADS = 32, 512, 4
"""Threads per warp, maximum threads per block, and maximum adjacent columns that a thread sums."""
_FEWEST, _MOST = 16, 256
"""Minimum and maximum number of values that a thread sums if several blocks share a column."""
_THREADS_PER_SM, _NUM_SMS = 2048, 132
"""Maximum resident threads per streaming multiprocessor, and number of multiprocessors, of an H100."""
_HEAD = 64
"""Multiple to which the memory-efficient kernel rounds the head size."""


def scratch(func: Any, args: Any, results: Any) -> tuple[Scratch, ...]:
    """Return the workspace that an operation allocates on a GPU while it runs."""
    return (Scratch(scratch_bytes(func, args, results)),)


def scratch_bytes(func: Any, args: Any, results: Any) -> int:
    """Return the bytes of workspace that an operation allocates on a GPU while it runs."""
    if func is _ATTENTION:
        return _attention_bytes(results[0])
    if func is _SUM and isinstance(args[0], Tensor):
        return _sum_bytes(args[0], args[1])
    return 0


def _attention_bytes(gradient: Tensor) -> int:
    *rows, size = gradient.shape
    rounded = size if gradient.element_size() == 2 else -(-size // _HEAD) * _HEAD
    return 4 * prod(rows) * (rounded + 1)


def _sum_bytes(tensor: Tensor, dims: list[int] | None) -> int:
    """Return the bytes of partial sums if the leading dimensions of a contiguous tensor are summed; 0 otherwise."""
    summed = sorted(dim % tensor.ndim for dim in dims or ())
    if (
        not summed
        or summed != list(range(len(summed)))
        or len(summed) == tensor.ndim
        or not tensor.is_contiguous()
    ):
        return 0
    rows, columns = prod(tensor.shape[: len(summed)]), prod(tensor.shape[len(summed) :])
    if not rows or not columns:
        return 0
    loads = next(each for each in (_LOADS, 2, 1) if columns % each == 0)
    threads = _MAX_THREADS // loads
    width = min(_power_of_two(columns // loads, threads), _WARP)
    height = min(_power_of_two(rows, threads), threads // width)
    width = min(_power_of_two(columns // loads, threads), threads // height)
    values = rows
    if values < min(16 * height, _MOST):  # each warp has columns of its own, and no thread waits for another
        return 0
    values = -(-values // height)
    grid = -(-(columns // loads) // width)
    target = _NUM_SMS * (_THREADS_PER_SM // (width * height))
    if values < _MOST or grid > target:
        return 0
    blocks = max(min(-(-target // grid), -(-values // _FEWEST)), -(-values // _MOST))
    return 4 * columns * blocks * width * loads if blocks > 1 else 0


def _power_of_two(number: int, most: int) -> int:
    """Return the largest power of two that is at most `number`, or `most` if that is less."""
    return most if number >= most else 1 << (number.bit_length() - 1)
