"""Evaluation on held-out data: each data-parallel rank evaluates some of the rows, and the results are averaged."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from shardscope.training.data import DataSource, read_batch
from shardscope.training.data.batches import named_tensors
from shardscope.training.loss import Pairing, accuracy, pairing_of
from shardscope.training.strategies.base import LossFunction, RankStrategy

MAX_ROWS, MAX_TARGETS = 512, 32_768
"""Maximum numbers of rows and of targets (tokens) in an evaluation: enough for a stable result, but fast."""


class FailedTogether(Exception):
    """Error that all ranks raise if an evaluation failed on any rank.

    It is raised after all ranks have completed their part of the communication. ``__cause__`` is the error on this
    rank, if any.
    """


def evaluate(
    strategy: RankStrategy,
    source: DataSource,
    loss_function: LossFunction,
    place: Callable[[Any], Any],
) -> dict[str, Any]:
    """Evaluate the model on the first rows of a split, and return the mean loss and accuracy.

    All ranks must call this together.

    At most `MAX_ROWS` rows and about `MAX_TARGETS` targets are evaluated.

    Args:
        strategy: This rank's strategy, which holds the model.
        source: The data to evaluate on.
        loss_function: Mean loss, called with the model's output and the targets.
        place: Function that moves a batch to the rank's device.

    Returns:
        ``loss``, ``accuracy`` (a fraction; None for regression) and ``samples``. Loss and accuracy are None if there
        are no rows.

    Raises:
        FailedTogether: The evaluation failed on any rank; all ranks raise this.
        Exception: A forward pass that needs all ranks failed on this rank; the other ranks may not be notified.
    """
    context = strategy.context
    totals = torch.zeros(4, dtype=torch.float64)  # samples, loss, accuracy, samples with an accuracy
    pairings: list[Pairing | None] = []  # computed once, as it reads all scores
    failures: list[Exception] = []
    apart = nullcontext() if strategy.lockstep and context.group is not None else _collect_errors(failures)
    with context.meter.span("compute", "evaluation"), strategy.evaluating() as predict, apart:
        for part, counts in _parts(strategy, _num_rows(source)):
            batch = None
            with _collect_errors(failures):
                batch = place(read_batch(source, part))
            inputs, targets = batch or strategy.example()  # other ranks may be waiting for this forward pass
            output = predict(inputs)
            if output is None or not counts or failures:
                continue
            with _collect_errors(failures):
                pairings = pairings or [pairing_of(output, targets)]
                score = accuracy(output, targets, pairing=pairings[0]) if pairings[0] else None
                loss, scored = float(loss_function(output, targets)), float(score is not None)
                totals += len(part) * torch.tensor([1.0, loss, score or 0.0, scored], dtype=torch.float64)
    if failures:
        totals.fill_(math.nan)  # a sum of counts is never NaN, so a NaN signals the failure to all ranks
    if context.group is not None:
        on_device = totals.to(context.device)
        dist.all_reduce(on_device)
        totals = on_device.cpu()
    samples, loss, hits, scored = totals.tolist()
    if math.isnan(samples):
        raise FailedTogether("on another rank") from next(iter(failures), None)
    if not samples:
        return {"loss": None, "accuracy": None, "samples": 0}
    return {
        "loss": loss / samples,
        "accuracy": hits / samples if scored == samples else None,
        "samples": int(samples),
    }


@contextmanager
def _collect_errors(failures: list[Exception]) -> Iterator[None]:
    """Return a context manager that catches any error in its block and appends it to `failures`."""
    try:
        yield
    except Exception as error:  # noqa: BLE001 - raised after the all-reduce
        failures.append(error)


def _parts(strategy: RankStrategy, num_rows: int) -> Iterator[tuple[Tensor, bool]]:
    """Yield this rank's row indices, one micro-batch at a time, each with a flag that is true if its result counts.

    If a forward pass needs all ranks, every rank must run the same number of micro-batches. A rank without a
    micro-batch left evaluates the first row instead, and these results do not count.
    """
    job, rank = strategy.job, strategy.data_rank
    if rank is None or not num_rows:
        return
    num_ranks = job.num_data_ranks
    size = max(1, job.batch.micro_batch or job.batch.per_rank(num_ranks))
    rows = torch.arange(num_rows)
    own = rows[rank::num_ranks]
    parts = own.split(size) if len(own) else ()
    for part in parts:
        yield part, True
    if strategy.lockstep:
        most = len(rows[::num_ranks].split(size))
        for _ in range(most - len(parts)):
            yield rows[:1], False


def _num_rows(source: DataSource) -> int:
    if not len(source):
        return 0
    _, targets = read_batch(source, torch.zeros(1, dtype=torch.int64))
    most = max((tensor.numel() for _, tensor in named_tensors(targets, "targets")), default=1)
    return min(len(source), MAX_ROWS, max(1, MAX_TARGETS // max(1, most)))
