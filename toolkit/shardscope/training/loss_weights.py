"""Weights of micro-batches and ranks in the mean loss of a step: the targets that count in each, of those in all.

Training must not depend on how a global batch is cut into micro-batches, nor on the number of ranks. If a part has n of
the N targets that count in the global batch, its mean loss has the weight n / N. Ranks sum their counts before the
forward pass, in one all-reduce of two numbers; runs list its bytes under `TRAFFIC` with those of measurements. Nothing
is sent, and all parts have equal weights, if no target of the data can be left out, as in classification without
unlabelled rows and in text.

The weights are known before the forward pass, so loss scaling, clipping and compression see the gradients of one
process. Where ranks do not average their gradients in each step, each rank takes the mean over its own targets.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from shardscope.errors import DataError
from shardscope.spec import Job
from shardscope.training.context import RankContext
from shardscope.training.data import DataSource, map_tensors, num_rows
from shardscope.training.data.batches import LABELS, Batch, call, named_tensors
from shardscope.training.data.shard_source import ShardSource
from shardscope.training.data.sources import ArraySource, RowSource, TensorSource
from shardscope.training.loss import Pairing, ResolvedLoss, own_loss, pairing_of, scores_of, shifted_count
from shardscope.training.observe import random_state_kept, unchanged
from shardscope.training.target_counts import IGNORED, Count
from shardscope.training.twin import twin_of

TRAFFIC = "target_counts"
"""Name under which the traffic of the counts is recorded; see `shardscope.runlog.schema.OBSERVING`."""
_ROWS_READ, _ROWS_TRIED = 32, 8
"""Rows that are read, before training, to try a model's or a user's own loss on some of them."""
_MOST_SCANNED = 2**28
"""Largest targets in memory, in bytes, that are searched for one that does not count; larger ones may have one."""
_NEAR, _NEAR_EXACT = 1e-4, 1e-5
"""Largest relative differences that are rounding: of a user's loss, and of a model's own without autocast."""


class BatchWeights:
    """Finds the weights of each step's micro-batches on one rank.

    Created by all ranks before the model is wrapped or split.

    Args:
        job: The job.
        context: This rank's context.
        loss: The job's loss.
        source: The training rows.
        model: The whole model, on the rank's device.
        read: Function that returns a number of rows, on the rank's device; the same rows on all ranks.

    Attributes:
        note: What the user must know about the weights, in a sentence; None if they are exact.
    """

    def __init__(
        self,
        job: Job,
        context: RankContext,
        loss: ResolvedLoss,
        *,
        source: DataSource,
        model: nn.Module,
        read: Callable[[int], Batch],
    ) -> None:
        self.job, self.context, self.loss = job, context, loss
        self.num_ranks = job.num_data_ranks
        self.is_counting = (loss.count is not None and not loss.is_sum) and can_leave_out(source, loss)
        self.is_joint = (
            job.strategy.needs_even_because is None
            and job.compression.period == 1
            and not job.compression.is_a_vote
        )
        self.count, self.note = loss.count, None
        if not isinstance(
            source, ShardSource
        ):  # opening a shard is slow, and its rows have no labels in their inputs
            with random_state_kept():
                if self.is_counting and loss.is_named:
                    self.count, self.note = _count_in_model(loss, model, self._example(read))
                elif loss.count is None and not loss.is_sum:
                    self.note = _tried_apart(loss, model, self._example(read))
        if self.is_counting and self.num_ranks > 1 and not self.is_joint:
            self.note = _APART.format(strategy=job.strategy.label, compression=job.compression.label)

    def _example(self, read: Callable[[int], Batch]) -> Batch:
        """Return a few rows, no more than a micro-batch has but at least two: those with most and least targets."""
        batch = self.job.batch
        most = max(2, min(_ROWS_TRIED, batch.micro_batch or batch.per_rank(self.num_ranks)))
        inputs, targets = read(_ROWS_READ)
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
        """Return the factor of each micro-batch's loss, so that the mean over ranks is that of the whole batch.

        A micro-batch with factor 0 has no target that counts. All ranks must call this.

        Args:
            step: Number of the step.
            micro_batches: This rank's micro-batches.
            sample_weight: This rank's samples, relative to the mean over ranks.

        Returns:
            The factors; None if micro-batches have equal weights, and ranks `sample_weight`.

        Raises:
            DataError: No target of the global batch counts; on all ranks.
        """
        if self.loss.is_sum:
            return [float(self.num_ranks)] * len(micro_batches)
        if not self.is_counting:
            return None
        counts = None if self.count is None else [self.count(targets) for _, targets in micro_batches]
        own = None if counts is None else math.fsum(counts)
        total = self._total(own)
        if counts is None or own is None or total is None:
            return None
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

    def _total(self, own: float | None) -> float | None:
        """Return the targets that count on all ranks; None if any rank cannot count them.

        Without an exchange, it is the number of ranks times this rank's own.
        """
        group = self.context.group
        if group is None or self.num_ranks == 1 or not self.is_joint:
            return None if own is None else own * self.num_ranks
        told = torch.tensor([own or 0.0, float(own is None)], dtype=torch.float64, device=self.context.device)
        total, unknown = group.sum_as(TRAFFIC, told).tolist()
        return None if unknown else float(total)


_APART = (
    "the gradient of each rank is the mean over its own targets, so with strategy={strategy!r} and "
    "compression={compression!r} a rank with fewer targets that count weighs as much as the others"
)
_OWN = (
    "the model's own loss is not the mean cross-entropy over its labels, so it is not known how many labels count: all "
    "micro-batches and ranks have equal weights; give a function as loss whose attribute count returns their number"
)
_CUT = (
    "loss={name!r} of some rows is not the mean of its values for parts of them, so the result depends on how the "
    "batch is cut into micro-batches and ranks, which all have equal weights; set its attribute count to a function "
    "that returns the number of targets that count, or reduction='sum' if it is a sum"
)


def can_leave_out(source: DataSource, loss: ResolvedLoss) -> bool:
    """Return whether parts of a batch from `source` can differ in the targets that count; the same on all ranks."""
    while isinstance(source, RowSource):
        source = source.source
    if getattr(source, "is_text", False):
        return not loss.is_named
    if not isinstance(source, ArraySource | TensorSource):
        return True
    held = [tensor for _, tensor in named_tensors(source.y, "y")] if isinstance(source, TensorSource) else []
    values = [torch.as_tensor(source.y)] if isinstance(source, ArraySource) else held
    if not loss.is_named or sum(value.nbytes for value in values) > _MOST_SCANNED:
        return True
    return any(bool((value == IGNORED).any()) for value in values if value.dtype == torch.int64)


def _count_in_model(loss: ResolvedLoss, model: nn.Module, example: Batch) -> tuple[Count | None, str | None]:
    """Return what counts the targets of a named loss, which a loss in the model's output replaces; or None and why."""
    inputs, targets = example
    output = _output(model, inputs)
    if output is None or own_loss(output) is None:
        return loss.count, None
    pairing = _pairing_by_trial(model, inputs, output) or pairing_of(output, targets, near=_NEAR_EXACT)
    return (None, _OWN) if pairing is None else (shifted_count(pairing), None)


def _pairing_by_trial(model: nn.Module, inputs: Any, output: Any) -> Pairing | None:
    """Return how a model pairs logits and labels, by its losses for labels that all count, and for the first of each.

    The labels of the data may not tell, as none of a few rows may count, and all classes cost about the same at first.
    """
    scores, labels = scores_of(output), inputs.get(LABELS) if isinstance(inputs, Mapping) else None
    if scores is None or not isinstance(labels, Tensor) or labels.dtype != torch.int64 or labels.dim() != 2:
        return None
    whole = torch.arange(labels.numel(), device=labels.device).view(labels.shape) % scores.shape[-1]
    first = torch.full_like(whole, IGNORED).index_copy(1, torch.tensor([0]).to(whole), whole[:, :1])
    tried, only_first = (_output(model, {**inputs, LABELS: each}) for each in (whole, first))
    of_first = own_loss(only_first)
    if own_loss(tried) is None or of_first is None:
        return None
    loss = float(of_first)
    return pairing_of(tried, whole, counts_first=math.isfinite(loss) and loss != 0, near=_NEAR_EXACT)


def _tried_apart(loss: ResolvedLoss, model: nn.Module, example: Batch) -> str | None:
    """Return a note if a user's loss is not the mean of its values for two parts of some rows."""
    inputs, targets = example
    rows = num_rows(inputs)
    output = _output(model, inputs) if rows > 1 else None
    first = max(1, rows // 3)
    parts = [(slice(rows), 1.0), (slice(first), -first / rows), (slice(first, rows), first / rows - 1)]
    try:
        own = copy.deepcopy(loss)  # it may have a state
        with torch.no_grad(), random_state_kept():
            values = [
                float(own(*map_tensors(partial(_cut, at=at, rows=rows), (output, targets))))
                for at, _ in parts
            ]
    except Exception:  # noqa: BLE001 - not a loss of rows; training reports what is wrong
        return None
    if not math.isfinite(values[0]) or not values[0]:
        return None
    apart = math.fsum(value * weight for value, (_, weight) in zip(values, parts, strict=True)) / values[0]
    return None if abs(apart) <= _NEAR else _CUT.format(name=loss.name)


def _cut(tensor: Tensor, *, at: slice, rows: int) -> Tensor:
    if tensor.dim() == 0 or len(tensor) != rows:
        raise ValueError("not a tensor with one row per sample")
    return tensor[at]


def _output(model: nn.Module, inputs: Any) -> Any:
    """Return the model's output in evaluation mode, without effects on the model; None if it cannot be had."""
    try:
        module = twin_of(model) or model
        with torch.no_grad(), unchanged(module, {}):
            return call(module.eval(), inputs)
    except Exception:  # noqa: BLE001 - training reports what is wrong
        return None
