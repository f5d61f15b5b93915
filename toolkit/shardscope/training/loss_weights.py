"""Weights of micro-batches and ranks in the mean loss of a step: each one's share of the targets that count.

Training must not depend on how a global batch is split into micro-batches, nor on the number of ranks. If a
part has n of the N targets that count in the global batch, its mean loss has the weight n / N. Ranks sum
their counts before the forward pass, in one all-reduce of a number; runs list its bytes under `TRAFFIC` with
the bytes of measurements. Nothing is sent, and all parts have equal weights, if no target of the data can be
left out, as in classification without unlabelled rows and in text.

The weights are known before the forward pass, so loss scaling, clipping and compression see the same gradients as in a
single process. Where ranks do not average their gradients in each step, each rank takes the mean over its own targets.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import suppress

import torch
from torch import Tensor, nn

from shardscope.errors import DataError
from shardscope.spec import Job
from shardscope.training.context import RankContext
from shardscope.training.data import DataSource, map_tensors, num_rows
from shardscope.training.data.batches import Batch, named_tensors
from shardscope.training.data.shard_source import ShardSource
from shardscope.training.data.sources import ArraySource, RowSource, TensorSource
from shardscope.training.loss import ResolvedLoss
from shardscope.training.loss_trial import VERDICTS, Trial, tried
from shardscope.training.observe import random_state_kept
from shardscope.training.target_counts import IGNORED, smooths_uncounted

TRAFFIC = "target_counts"
"""Name under which the traffic of the counts is recorded; see `shardscope.runlog.schema.OBSERVING`."""
_ROWS_READ, _ROWS_TRIED = 32, 8
"""Number of rows read before training, and number of them on which a model's or user's own loss is tried."""
_MOST_SCANNED = 2**28
"""Targets up to this size, in bytes, are searched for elements that do not count; larger targets may have some."""


class BatchWeights:
    """Finds the weights of each step's micro-batches on one rank.

    Created by all ranks before the model is wrapped or split.

    Args:
        job: The job.
        context: This rank's context.
        loss: The job's loss.
        source: The training rows.
        model: The whole model, on the rank's device.
        read: Function that returns rows by their numbers, on the rank's device.

    Attributes:
        note: Warning about the weights for the user, in a sentence; None if they are exact.
    """

    def __init__(
        self,
        job: Job,
        context: RankContext,
        loss: ResolvedLoss,
        *,
        source: DataSource,
        model: nn.Module,
        read: Callable[[Tensor], Batch],
    ) -> None:
        self.job, self.context, self.loss = job, context, loss
        self.num_ranks = job.num_data_ranks
        self.is_joint = (
            job.strategy.needs_even_because is None
            and job.compression.period == 1
            and not job.compression.is_a_vote
        )
        leaves_out, self.found = can_leave_out(source), Trial(loss.count)
        held = _within(source)
        self.is_own_possible = isinstance(held, TensorSource) and not isinstance(held.x, Tensor)
        """Whether the model may receive its labels as inputs, and so compute its loss itself."""
        if isinstance(_within(source), ShardSource):  # rows read now would be fetched twice
            is_unknown = leaves_out and loss.count is None and not loss.is_sum
            self.found = Trial(loss.count, _UNTRIED.format(name=loss.name) if is_unknown else None)
        else:
            self.found, leaves_out = self._agreed(lambda: self._example(source, read), model, leaves_out)
        self.count, self.note = self.found.count, self.found.note
        reads_classes = loss.is_named or self.found.is_own
        self.is_counting = self.count is not None and not loss.is_sum and (leaves_out or not reads_classes)
        if self.is_counting and smooths_uncounted(loss.given):
            self.note = _SMOOTHED.format(name=loss.name)
        if self.is_counting and self.num_ranks > 1 and not self.is_joint:
            self.note = _APART.format(strategy=job.strategy.label, compression=job.compression.label)

    def _agreed(self, example: Callable[[], Batch], model: nn.Module, leaves_out: bool) -> tuple[Trial, bool]:
        """Try the loss if needed; return the result agreed by all ranks, and whether any rank may have ignored targets.

        If results differ between ranks, for example because the model cannot be evaluated on one of them, no rank
        counts targets. Otherwise, the ranks would call different collectives in a step.
        """
        found = Trial(self.loss.count)
        if self.loss.count is None or (self.loss.is_named and (leaves_out or self.is_own_possible)):
            found = Trial(self.loss.count, failed=True)
            with (
                random_state_kept(),
                suppress(Exception),
            ):  # of the user's data; training reports what is wrong
                found = tried(self.loss, model, example(), leaves_out=leaves_out)
        group = self.context.group
        if group is None or self.context.world_size == 1:
            return found, leaves_out
        told = torch.zeros(self.context.world_size, dtype=torch.float64, device=self.context.device)
        told[self.context.rank] = 2 * VERDICTS.index(found.verdict) + leaves_out
        codes = [int(code) for code in group.sum_as(TRAFFIC, told).tolist()]
        verdicts, leaves_out = [VERDICTS[code // 2] for code in codes], any(code % 2 for code in codes)
        if len({*verdicts}) == 1:
            return found, leaves_out
        told_by = "; ".join(f"rank {rank}: {verdict}" for rank, verdict in enumerate(verdicts))
        return Trial(None, _APART_ON_RANKS.format(name=self.loss.name, found=told_by)), leaves_out

    def _example(self, source: DataSource, read: Callable[[Tensor], Batch]) -> Batch:
        """Return a few rows, at least two but at most a micro-batch: those with the most and the fewest targets."""
        batch, is_in_memory = self.job.batch, isinstance(_within(source), ArraySource | TensorSource)
        most = max(2, min(_ROWS_TRIED, batch.micro_batch or batch.per_rank(self.num_ranks)))
        number = min(_ROWS_READ if is_in_memory else _ROWS_TRIED, len(source))
        rows = torch.arange(number) * len(source) // number  # of sorted rows, the first are all alike
        inputs, targets = read(torch.cat([rows, _unlabelled(source)]))
        ignored = torch.zeros(num_rows(inputs))
        if isinstance(targets, Tensor):
            ignored = (
                targets.eq(IGNORED).flatten(1).sum(dim=1) if targets.dim() > 1 else targets.eq(IGNORED).int()
            )
        order = ignored.argsort(stable=True)
        rows = torch.cat([order[: most - most // 2], order[most - most // 2 :][-(most // 2) :]])
        inputs, targets = map_tensors(lambda tensor: tensor[rows], (inputs, targets))
        return inputs, targets

    def of(self, step: int, micro_batches: Sequence[Batch], sample_weight: float) -> list[float] | None:
        """Return the factor of each micro-batch's loss that makes the mean over ranks the mean over the whole batch.

        A micro-batch with factor 0 has no target that counts. All ranks must call this.

        Args:
            step: Number of the step.
            micro_batches: This rank's micro-batches.
            sample_weight: This rank's samples, relative to the mean over ranks.

        Returns:
            The factors; None if micro-batches have equal weights and the rank's weight is `sample_weight`.

        Raises:
            DataError: No target of the global batch counts; raised on all ranks.
        """
        if self.loss.is_sum:
            return [float(self.num_ranks)] * len(micro_batches)
        if not self.is_counting or (self.num_ranks == 1 and not micro_batches):  # a server of one worker
            return None
        assert self.count is not None
        counts = [self.count(targets) for _, targets in micro_batches]
        own = math.fsum(counts)
        total = self._total(own)
        if not total:
            self._require_targets(step)
            return [0.0] * len(micro_batches)
        is_even = len(set(counts)) == 1 and own * self.num_ranks / total == sample_weight
        return None if is_even else [count * self.num_ranks / total for count in counts]

    def _require_targets(self, step: int) -> None:
        if self.is_joint or self.num_ranks == 1:
            why = f": every target is {IGNORED}, which it ignores" if self.loss.is_named else ""
            raise DataError(
                f"no target of the global batch of step {step} counts in loss={self.loss.name!r}{why}; leave out rows "
                "without a target, or use a larger global_batch"
            )

    def _total(self, own: float) -> float:
        """Return the number of targets that count, over all ranks.

        Without an exchange, this is the number of ranks times this rank's own count.
        """
        group = self.context.group
        if group is None or self.num_ranks == 1 or not self.is_joint:
            return own * self.num_ranks
        told = torch.tensor(own, dtype=torch.float64, device=self.context.device)
        return float(group.sum_as(TRAFFIC, told))


_UNTRIED = (
    "loss={name!r} is not tried on shards, so it is not known whether some targets do not count in it: all "
    "micro-batches and ranks have equal weights; set its attribute count to a function that returns the number of "
    "targets that count"
)
_SMOOTHED = (
    "loss={name} gives targets of classes with weight 0 a loss by label smoothing, but a micro-batch with only such "
    "targets adds 0, as its mean is not defined; use a larger micro_batch, or weights above 0"
)
_APART_ON_RANKS = (
    "a trial of loss={name!r} before training gave different results ({found}), so it is not known how many targets "
    "count: all micro-batches and ranks have equal weights; look for code of the model, loss or data that depends on "
    "the rank, or set the loss's attribute count to a function that returns the number of targets that count"
)
_APART = (
    "the gradient of each rank is the mean over its own targets, so with strategy={strategy!r} and "
    "compression={compression!r} a rank with fewer targets that count weighs as much as the others"
)


def can_leave_out(source: DataSource) -> bool:
    """Return whether a source may have a class that a named loss ignores; the same on all ranks."""
    source = _within(source)
    if getattr(source, "is_text", False):
        return False
    classes = _classes_in_memory(source)
    return classes is None or any(bool((value == IGNORED).any()) for value in classes)


def _unlabelled(source: DataSource) -> Tensor:
    """Return the index of a row with a target that a named loss ignores, in a vector; empty if none is known."""
    rows = torch.arange(len(source))
    while isinstance(source, RowSource):
        rows, source = source.rows[rows], source.source
    for value in _classes_in_memory(source) or ():
        found = (value == IGNORED).flatten(1).any(dim=1) if value.dim() > 1 else value == IGNORED
        if found[rows].any():
            return found[rows].int().argmax(keepdim=True)
    return torch.empty(0, dtype=torch.int64)


def _classes_in_memory(source: DataSource) -> list[Tensor] | None:
    """Return the integer targets of a source; None if they are too large to search, or not in memory."""
    if not isinstance(source, ArraySource | TensorSource):
        return None
    values = (
        [torch.as_tensor(source.y)]
        if isinstance(source, ArraySource)
        else [tensor for _, tensor in named_tensors(source.y, "y")]
    )
    if sum(value.nbytes for value in values) > _MOST_SCANNED:
        return None
    return [value for value in values if value.dtype == torch.int64]


def _within(source: DataSource) -> DataSource:
    while isinstance(source, RowSource):
        source = source.source
    return source
