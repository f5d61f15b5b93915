"""Bytes that autograd saves on the ranks of a pipeline, for the backward passes of all micro-batches in flight.

A stage saves the tensors of a micro-batch in its forward pass, and the last stage those of the loss too. A backward
pass frees a stage's layers one after another; a recomputed layer first saves its tensors again, and keeps most of them
until it is done. If the backward pass is split, the pass for inputs frees only the loss, and only at its end, because
torch keeps the graph of the layers for the pass for weights (`stage_backward_input` of
`torch.distributed.pipelining`). Both recompute layers. The pass for weights frees each layer, the last one first if
whole blocks are recomputed. Both are traced layer by layer. The first stage has no pass for inputs.
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
    """The same in the pass for inputs of a split backward pass."""
    kept_for_weights: float
    """Bytes by which they have grown after the pass for inputs."""
    recomputed_for_weights: float
    """Bytes by which they grow in the pass for weights, at most."""


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
    held = peak = kept = at_weights = 0.0
    for piece in pieces:
        held += piece.saved(mode)
        peak = max(peak, held + piece.recomputed(mode))
        _, between, for_weights = piece.recomputed_split(mode)
        at_weights = max(at_weights, held + kept + for_weights)
        kept += between
    at_inputs, after_inputs = 0.0, 0.0
    for piece in reversed(pieces):
        for_inputs, between, _ = piece.recomputed_split(mode)
        at_inputs = max(at_inputs, after_inputs + for_inputs)
        after_inputs += between
    return StageSaved(
        samples * held, samples * loss_bytes, samples * (peak - held),
        samples * at_inputs, samples * kept, samples * (at_weights - held),
    )  # fmt: skip


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
            is_split = micro_batch in without_loss
            held -= stage.kept_for_weights if is_split else stage.loss
            again = stage.recomputed_for_weights if is_split else stage.recomputed
            yield held + max(again, 0.0 if is_split else stage.loss)
            held -= stage.layers
