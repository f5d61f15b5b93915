"""Evaluation on the test split, shared out over the data ranks; their means are put together."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

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
) -> dict[str, Any]:
    """Mean loss and accuracy (None for regressions) over the test split's first rows; called by all ranks."""
    context = strategy.context
    totals = torch.zeros(4, dtype=torch.float64)  # samples, loss, accuracy, samples that have an accuracy
    with context.meter.span("compute", "evaluation"), strategy.evaluating() as predict:
        for part, counts in _parts(strategy, _num_rows(source)):
            inputs, targets = (place(tensor) for tensor in source.batch(part))
            output = predict(inputs)
            if output is None or not counts:
                continue
            score = accuracy(output, targets)
            loss, scored = float(loss_function(output, targets)), float(score is not None)
            totals += len(part) * torch.tensor([1.0, loss, score or 0.0, scored], dtype=torch.float64)
    if context.group is not None:
        on_device = totals.to(context.device)
        dist.all_reduce(on_device)
        totals = on_device.cpu()
    samples, loss, hits, scored = totals.tolist()
    if not samples:
        return {"loss": None, "accuracy": None, "samples": 0}
    return {
        "loss": loss / samples,
        "accuracy": hits / samples if scored == samples else None,
        "samples": int(samples),
    }


def _parts(strategy: Strategy, num_rows: int) -> Iterator[tuple[Tensor, bool]]:
    """This rank's rows, a micro-batch at a time, and whether they count.

    Where a forward pass needs all ranks, each gets equally many parts of equal size: what is missing is filled with
    the first row, and does not count.
    """
    job, rank = strategy.job, strategy.data_rank
    if rank is None or not num_rows:
        return
    num_ranks = job.num_data_ranks
    size = max(1, job.batch.micro_size or job.batch.per_rank(num_ranks))
    rows = torch.arange(num_rows)
    own = rows[rank::num_ranks]
    parts = own.split(size) if len(own) else ()
    for part in parts:
        yield part, True
    if strategy.lockstep:
        most = len(rows[::num_ranks].split(size))
        for _ in range(most - len(parts)):
            yield rows[:1], False


def _num_rows(source: Source) -> int:
    if not len(source):
        return 0
    targets = source.batch(torch.zeros(1, dtype=torch.int64))[1].numel()
    return min(len(source), MAX_ROWS, max(1, MAX_TARGETS // targets))
