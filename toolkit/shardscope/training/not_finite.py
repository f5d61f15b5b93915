"""Explains why a loss is no longer finite, and what to do about it."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from shardscope.spec import Job
from shardscope.training.data.batches import Batch, named_tensors_of
from shardscope.training.loss import may_lack_targets


def explained(
    loss: float, step: int, micro_batches: Sequence[Batch], rows: Sequence[Tensor], *, counts_targets: bool
) -> str | None:
    """Return the error message if the data of the step are the cause; None if they are not.

    Args:
        loss: The loss.
        step: Number of the step.
        micro_batches: The rank's micro-batches.
        rows: Numbers of the rows of each micro-batch in the training split.
        counts_targets: Whether a micro-batch without targets contributes 0.
    """
    bad = _bad_row(micro_batches, rows)
    if bad is not None:
        return f"the loss became {loss} in step {step} because {bad}; correct the data or remove the row"
    if not counts_targets and any(may_lack_targets(targets) for _, targets in micro_batches):
        return (
            f"the loss became {loss} in step {step} because no target of a micro-batch counts; set the loss's "
            "attribute count to a function that returns how many targets count, so that the micro-batch adds 0"
        )
    return None


def at_learning_rate(loss: float, lr: float, job: Job, *, counts_targets: bool = True) -> str:
    """Return the error message that names the learning rate as the cause or, perhaps, a loss without a target count."""
    advice = (
        "lower the learning rate, warm up longer, or set clip_norm"
        if job.clip_norm is None
        else "lower the learning rate or warm up longer"
    )
    or_count = (
        "" if counts_targets else "; or set the loss's attribute count, if a micro-batch may have no target"
    )
    return f"the loss became {loss} with learning rate {lr:.3g}; {advice}{or_count}"


def _bad_row(micro_batches: Sequence[Batch], micro_rows: Sequence[Tensor]) -> str | None:
    """Return a description of the first row with a NaN or an infinity, or None."""
    for batch, rows in zip(micro_batches, micro_rows, strict=True):
        for name, tensor in named_tensors_of(batch):
            finite = tensor.isfinite().flatten(1).all(dim=1) if tensor.dim() > 1 else tensor.isfinite()
            if not finite.all():
                first = int(finite.cpu().logical_not().nonzero()[0])
                return f"row {int(rows[first])} of the training split has a NaN or an infinity in {name}"
    return None
