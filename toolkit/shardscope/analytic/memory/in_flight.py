"""Bytes that autograd saves on the ranks of a pipeline, for the backward passes of all micro-batches in flight.

A stage saves the tensors of a micro-batch in its forward pass, and the last stage those of the loss too. A backward
pass frees a stage's layers one after another; a recomputed layer first saves its tensors again, and keeps most of them
until it is done. If the backward pass is split, the first part frees only the loss, and only at its end, because torch
keeps the graph of the layers for the second part (`stage_backward_input` of `torch.distributed.pipelining`). The second
part computes the gradients of each operation's weights by themselves: it recomputes a layer for each, and frees the
results as later operations need them. Both are traced layer by layer. The first stage has no first part.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from shardscope.analytic.schedules.table import ScheduleTable
from shardscope.analytic.schedules.timeline import ScheduledOp
from shardscope.spec.model.step import PipelinePiece


class StageSaved(NamedTuple):
    """Bytes that a stage saves for one micro-batch."""

    layers: float
    """Bytes saved by the forward pass of the stage's layers."""
    loss: float
    """Bytes saved by the loss; 0 before the last stage."""
    recomputed: float
    """Bytes by which those of the layers grow in their backward pass, at most; 0 without recomputation."""
    recomputed_for_inputs: float
    """The same in the first part of a split backward pass."""
    kept_for_weights: float
    """Bytes by which they have grown after the first part."""
    recomputed_for_weights: float
    """Bytes by which they have grown at the end of the second part."""


def stage_saved(
    pieces: Sequence[PipelinePiece], mode: str, *, samples: float, loss_bytes: float = 0.0
) -> StageSaved:
    """Return what a stage saves for one micro-batch.

    Args:
        pieces: The layers of the stage.
        mode: Recomputation mode.
        samples: Number of samples in the micro-batch.
        loss_bytes: Bytes saved by the loss for one sample, in the last stage.
    """
    held, peak = 0.0, 0.0
    for piece in pieces:
        held += piece.saved(mode)
        peak = max(peak, held + piece.recomputed(mode))
    most, kept, again = recomputed_in_halves(pieces, mode)
    return StageSaved(
        samples * held, samples * loss_bytes, samples * (peak - held),
        samples * most, samples * kept, samples * again,
    )  # fmt: skip


def recomputed_in_halves(pieces: Sequence[PipelinePiece], mode: str) -> tuple[float, float, float]:
    """Return the bytes, for one sample, by which those of a stage's layers grow in a split backward pass.

    At most in the first half, after it, and at most in the second half. The first half runs the last layer first, and
    frees nothing; the second half runs the first layer first, and frees a layer's operations with those of the last.
    """
    halves = [piece.recomputed_in_halves(mode) for piece in pieces]
    most = again = kept = 0.0
    for first, between, _, _ in reversed(halves):
        most = max(most, kept + first)
        kept += between
    now = kept
    for _, between, second, after in halves:
        again = max(again, now - between + second)
        now += after - between
    return most, kept, again


def saved_in_flight(table: ScheduleTable, stages: Sequence[StageSaved]) -> list[list[tuple[int, float]]]:
    """Return the most bytes that each rank holds while each of its operations runs.

    Args:
        table: The schedule of one pass.
        stages: What each stage saves.

    Returns:
        One list per rank, with a pair for each operation: the operation's index into `ScheduleTable.ops`, and bytes.
    """
    rows, first = [], 0
    for ops in table.ranks:
        rows.append([*enumerate(_running(ops, stages), first)])
        first += len(ops)
    return rows


def _running(ops: Sequence[ScheduledOp], stages: Sequence[StageSaved]) -> Iterator[float]:
    held, without_loss = 0.0, set[tuple[int, int]]()
    for op in ops:
        stage, micro_batch = stages[op.stage], (op.stage, op.microbatch)
        if op.op == "F":
            held += stage.layers + stage.loss
            yield held
        elif op.op == "I":
            if not op.stage:
                yield held
                continue
            yield held + stage.recomputed_for_inputs
            held += stage.kept_for_weights - stage.loss
            without_loss.add(micro_batch)
        else:
            is_second = micro_batch in without_loss
            held -= stage.kept_for_weights if is_second else stage.loss
            again = stage.recomputed_for_weights if is_second else stage.recomputed
            yield held + max(again, 0.0 if is_second else stage.loss)
            held -= stage.layers
