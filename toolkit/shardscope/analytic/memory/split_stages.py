"""Memory of a pipeline stage in a backward pass that is split into the gradients of inputs and those of weights.

The first half runs the layers in reverse order and frees nothing: torch keeps the graph, and the gradients of the
results of operations with weights (`stage_backward_input` of `torch.distributed.pipelining`). The second half runs the
layers in order and frees those of each operation. Both are traced layer by layer.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from shardscope.analytic.memory.sharded_stages import Alive
from shardscope.spec.model.step import PipelinePiece, SplitBackward


class StageHalves(NamedTuple):
    """Bytes of one micro-batch on a stage in the two halves of its backward pass."""

    first: float
    """Activations at the peak of the first half, in addition to those that the forward pass has saved."""
    kept: float
    """By how much activations have grown after it; negative if it has freed more."""
    second: Alive
    """The peak of the second half, if the stage has no gradients yet."""
    later: Alive
    """The peak of the second half, if an earlier one has left gradients, which are not part of it."""


class StageEnd(NamedTuple):
    """Bytes of one sample at the end of a stage."""

    output: float = 0.0
    """The model's output; 0 before the last stage."""
    loss: float = 0.0
    """What the loss saves; 0 before the last stage."""
    at_loss: float = 0.0
    """By how much the passes of the loss exceed what it and the layers save; 0 before the last stage."""


def stage_halves(
    pieces: Sequence[PipelinePiece],
    gradients: Sequence[float],
    mode: str,
    end: StageEnd,
    *,
    samples: float,
    saved: float,
    is_sharded: bool,
) -> StageHalves:
    """Return the memory of the two halves of a stage's backward pass.

    Args:
        pieces: The layers of the stage.
        gradients: Bytes of the gradients of each layer's parameters.
        mode: Recomputation mode.
        end: The end of the stage.
        samples: Number of samples in a micro-batch.
        saved: Bytes that the stage saves for a micro-batch.
        is_sharded: Whether later gradients are whole too, because earlier ones have been reduced to shards.
    """
    halves = [piece.split.get(mode, SplitBackward()) for piece in pieces]
    arrives = [*(piece.output_bytes for piece in pieces[:-1]), end.output]
    kept, first = 0.0, end.at_loss
    for half, arrived in zip(reversed(halves), reversed(arrives), strict=True):
        first = max(first, kept + arrived + half.first)
        kept += half.kept + half.of_output * (arrived > 0)  # otherwise it is a message
    kept -= end.output + end.loss
    start, done = saved + samples * kept, 0.0
    second = later = Alive(start)
    for half, own in zip(halves, gradients, strict=True):
        for activations, arriving, complete in half.second:
            now = start + samples * activations
            second = max(second, Alive(now, done + arriving + complete), key=sum)
            later = max(later, Alive(now, arriving), key=sum)
        start += samples * half.left
        done += own
    return StageHalves(samples * first, samples * kept, second, second if is_sharded else later)
