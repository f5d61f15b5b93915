"""Evaluation on the test split, shared out over the ranks: each takes every W-th row, and means are put together."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from shardscope.spec import Batch
from shardscope.training.data import Source
from shardscope.training.loss import accuracy
from shardscope.training.strategies.base import LossFunction, Strategy

MAX_ROWS, MAX_TARGETS = 512, 32_768
"""How much of the test split an evaluation looks at, in rows and in targets (tokens): enough for a figure, few enough
not to be felt."""


def evaluate(
    strategy: Strategy,
    source: Source,
    loss_function: LossFunction,
    place: Callable[[Tensor], Tensor],
    batch: Batch,
) -> dict[str, Any]:
    """Mean loss and accuracy (None for regressions) over the test split's first rows; called by all ranks."""
    context = strategy.context
    rows = torch.arange(_num_rows(source))[context.rank :: context.world_size]
    totals = torch.zeros(3, dtype=torch.float64)  # samples, loss, accuracy
    scored = True
    with context.meter.span("compute", "evaluation"), strategy.evaluating() as model:
        for part in rows.split(max(1, batch.micro_size or batch.per_rank(context.world_size))):
            inputs, targets = (place(tensor) for tensor in source.batch(part))
            output = model(inputs)
            score = accuracy(output, targets)
            scored = scored and score is not None
            totals += len(part) * torch.tensor([1.0, float(loss_function(output, targets)), score or 0.0])
    if context.group is not None:
        on_device = totals.to(context.device)
        dist.all_reduce(on_device)
        totals = on_device.cpu()
    samples, loss, hits = totals.tolist()
    if not samples:
        return {"loss": None, "accuracy": None, "samples": 0}
    return {"loss": loss / samples, "accuracy": hits / samples if scored else None, "samples": int(samples)}


def _num_rows(source: Source) -> int:
    if not len(source):
        return 0
    targets = source.batch(torch.zeros(1, dtype=torch.int64))[1].numel()
    return min(len(source), MAX_ROWS, max(1, MAX_TARGETS // targets))
