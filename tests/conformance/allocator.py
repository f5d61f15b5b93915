"""Memory of a real training step as torch's CPU allocator records it, beside a prediction from shapes."""

from __future__ import annotations

import gc
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile
from torch.utils._pytree import tree_leaves, tree_map_only

from shardscope.analytic.memory import module_memory
from shardscope.spec.model import LayerTable
from shardscope.training.describe import describe
from shardscope.training.precision import DTYPES, weight_dtype


class Peaks(NamedTuple):
    """Bytes at the peak of a step, beside parameters, buffers and inputs, and what the trace says."""

    predicted: float
    measured: int
    table: LayerTable

    @property
    def ratio(self) -> float:
        return self.predicted / self.measured


def allocated(step: Callable[[], object]) -> tuple[int, int]:
    """Bytes that a function allocates: at its peak, and at its end."""
    gc.collect()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
        result = step()
    events = recorded.profiler.kineto_results.events()  # type: ignore[union-attr]
    now = peak = 0
    for _, change in sorted((each.start_ns(), each.nbytes()) for each in events if each.name() == "[memory]"):
        now += change
        peak = max(peak, now)
    del result
    return peak, now


def sum_of(output: Any, _: Any) -> Tensor:
    """A loss of all that a module returns and that needs a gradient."""
    return sum((leaf.float().mean() for leaf in _trained(output)), torch.zeros(()))


def _trained(output: Any) -> list[Tensor]:
    leaves = tree_leaves(getattr(output, "data", output) if not isinstance(output, Tensor) else output)
    return [leaf for leaf in leaves if isinstance(leaf, Tensor) and leaf.requires_grad]


def in_precision(precision: str, values: Any) -> Any:
    dtype = weight_dtype(precision)
    return tree_map_only(Tensor, lambda each: each.to(dtype) if each.is_floating_point() else each, values)


def _autocast(precision: str) -> Callable[[], AbstractContextManager[Any]]:
    is_mixed = DTYPES[precision] is not weight_dtype(precision)
    return partial(torch.autocast, "cpu", dtype=DTYPES[precision]) if is_mixed else nullcontext


def traced(module: nn.Module, inputs: Any, precision: str, loss: Any, targets: Any = None) -> LayerTable:
    is_mixed = DTYPES[precision] is not weight_dtype(precision)
    return describe(
        module, inputs, memory=True, loss=loss, targets=targets, recompute=("none",),
        autocast=DTYPES[precision] if is_mixed else None,
    )  # fmt: skip


def peaks(
    module: nn.Module, inputs: Any, precision: str = "fp32", loss: Any = sum_of, targets: Any = None
) -> Peaks:
    """The peak of one training step on one thread, by the trace and by the allocator."""
    module, inputs = module.to(weight_dtype(precision)), in_precision(precision, inputs)
    table = traced(module, inputs, precision, loss, targets)
    samples = next(leaf for leaf in tree_leaves(inputs) if isinstance(leaf, Tensor) and leaf.ndim).shape[0]
    held = module_memory(
        table, batch=samples, optimizer="sgd", element_bytes=weight_dtype(precision).itemsize
    )

    def step() -> None:
        with _autocast(precision)():
            given = module(**inputs) if isinstance(inputs, Mapping) else module(*inputs)
            value = loss(given, targets)
            del given
        value.backward()

    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # as on a rank
    try:
        for _ in range(2):
            step()
            module.zero_grad(set_to_none=True)
        measured, _ = allocated(step)
    finally:
        torch.set_num_threads(threads)
    return Peaks(held.alive + held.moving, measured, table)
