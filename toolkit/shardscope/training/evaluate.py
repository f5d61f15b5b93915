"""Evaluation on held-out data: each data-parallel rank evaluates some of the rows, and the results are averaged.

The loss is the mean over all targets that count, so it does not depend on micro-batches and ranks (see `loss_weights`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from shardscope.training.data import DataSource, read_batch
from shardscope.training.data.batches import named_tensors
from shardscope.training.loss import Pairing, ResolvedLoss, hits, may_lack_targets, own_loss, pairing_of
from shardscope.training.loss_trial import Trial
from shardscope.training.strategies.base import RankStrategy

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
    loss_function: ResolvedLoss,
    place: Callable[[Any], Any],
    trial: Trial | None = None,
) -> dict[str, Any]:
    """Evaluate the model on the first rows of a split, and return the mean loss and accuracy.

    All ranks must call this together.

    At most `MAX_ROWS` rows and about `MAX_TARGETS` targets are evaluated.

    Args:
        strategy: This rank's strategy, which holds the model.
        source: The data to evaluate on.
        loss_function: The job's loss.
        place: Function that moves a batch to the rank's device.
        trial: Result of trying the loss before training, the same on all ranks; None if it was not tried.

    Returns:
        ``loss``, ``accuracy`` (a fraction; None for regression) and ``samples``. Loss and accuracy are None if there
        are no rows, or no targets that count.

    Raises:
        FailedTogether: The evaluation failed on any rank; all ranks raise this.
        Exception: A forward pass that needs all ranks failed on this rank; the other ranks may not be notified.
    """
    context = strategy.all_ranks
    totals = torch.zeros(len(_Sums._fields), dtype=torch.float64)
    found = _Found(loss_function, trial)
    failures: list[Exception] = []
    apart = nullcontext() if strategy.lockstep and context.group is not None else _collect_errors(failures)
    with context.meter.span("compute", "evaluation"), strategy.evaluating() as predict, apart:
        for part, counts in _parts(strategy, _num_rows(source)):
            batch = None
            with _collect_errors(failures):
                batch = place(read_batch(source, part))
                if strategy.sequence_split is not None:
                    batch = strategy.sequence_split.part(batch)
            inputs, targets = batch or strategy.example()  # other ranks may be waiting for this forward pass
            output = predict(inputs)
            if output is None or not counts or failures:
                continue
            with _collect_errors(failures):
                totals += torch.tensor(found.sums(output, targets, len(part)), dtype=torch.float64)
    if failures:
        totals.fill_(math.nan)  # a sum of counts is never NaN, so a NaN signals the failure to all ranks
    if context.group is not None:
        on_device = totals.to(context.device)
        dist.all_reduce(on_device)
        totals = on_device.cpu() / (
            1 if strategy.same_samples is None else strategy.same_samples.size
        )  # equal on its ranks
    sums = _Sums(*totals.tolist())
    if math.isnan(sums.samples):
        raise FailedTogether("on another rank") from next(iter(failures), None)
    return {
        "loss": sums.loss / (1.0 if loss_function.is_sum else sums.weight) if sums.weight else None,
        "accuracy": sums.hits / sums.targets if sums.targets and not sums.unscored else None,
        "samples": int(sums.samples) // strategy.ranks_per_sample,
    }


class _Sums(NamedTuple):
    """Sums over parts of a split; `hits` are correct targets, and `unscored` rows have no known accuracy."""

    samples: float
    loss: float
    weight: float
    hits: float
    targets: float
    unscored: float


class _Found:
    """Evaluates parts of a split on one rank.

    The pairing of logits and targets is a trial's result, or is determined once, from the first part that
    allows it.
    """

    def __init__(self, loss: ResolvedLoss, trial: Trial | None) -> None:
        self.loss = loss
        is_own = trial is not None and trial.is_own
        self.pairing: Pairing | None = trial.pairing if trial is not None and is_own else None
        self._is_settled = is_own  # as finding the pairing reads all scores

    def sums(self, output: Any, targets: Any, rows: int) -> _Sums:
        """Return the contribution of one part to the sums."""
        value = self.loss(output, targets)
        loss = float(value)
        if not self._is_settled and (own_loss(output) is None or not may_lack_targets(targets)):
            self.pairing, self._is_settled = pairing_of(output, targets), True
        counted = None if self.loss.is_sum else self.loss.count_of(output, targets, value, self.pairing)
        if counted is None and math.isnan(loss) and may_lack_targets(targets):
            counted = 0.0
        weight = float(rows) if counted is None else counted
        found = hits(output, targets, pairing=self.pairing) if self.pairing else None
        return _Sums(
            samples=rows,
            loss=loss * (1.0 if self.loss.is_sum else weight)
            if weight
            else 0.0,  # a mean over no targets is NaN
            weight=weight,
            hits=found[0] if found else 0,
            targets=found[1] if found else 0,
            unscored=0 if found or not weight else rows,
        )


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
    num_ranks = strategy.of_data.job.num_data_ranks // strategy.ranks_per_sample
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
