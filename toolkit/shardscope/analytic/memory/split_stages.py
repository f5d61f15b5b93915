"""Memory of a pipeline stage whose backward pass is split into one for inputs and one for weights.

The pass for inputs runs the layers in reverse order and frees nothing but what the loss has saved: torch keeps the
graph, and the gradients of the results of operations with weights (`stage_backward_input` of
`torch.distributed.pipelining`). The pass for weights frees those of each operation. It runs the first layer first, or
the last one if whole blocks are recomputed. Both are traced layer by layer.

The pass for weights computes the gradients of one group of parameters after another: those of an operation, or of all
operations that share a parameter. If earlier gradients exist, to which it adds them, torch keeps those of a group until
it has computed the next. The gradients of a parameter that several operations use are summed in a tensor of their own.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from shardscope.analytic.memory.sharded_stages import Alive
from shardscope.spec.model.step import PipelinePiece


class SplitStage(NamedTuple):
    """Bytes of one micro-batch on a stage in the two passes of its backward pass."""

    for_inputs: float
    """Activations at the peak of the pass for inputs, in addition to those that the forward pass has saved."""
    between: float
    """By how much activations have grown after it; negative if it has freed more."""
    first: Alive
    """The peak of the pass for weights, if the stage has no gradients yet."""
    later: Alive
    """The peak of the pass for weights, if an earlier one has left gradients, which are not part of it."""


class StageEnd(NamedTuple):
    """Bytes of one sample at the end of a stage."""

    output: float = 0.0
    """The model's output; 0 before the last stage."""
    loss: float = 0.0
    """What the loss saves; 0 before the last stage."""
    at_loss: float = 0.0
    """By how much the passes of the loss exceed what it and the layers save; 0 before the last stage."""


def split_stage(
    pieces: Sequence[PipelinePiece],
    gradients: Sequence[float],
    mode: str,
    end: StageEnd,
    *,
    samples: float,
    saved: float,
    is_sharded: bool,
    tied: Sequence[tuple[float, Sequence[int]]] = (),
) -> SplitStage:
    """Return the memory of the two passes of a stage's backward pass.

    Args:
        pieces: The layers of the stage.
        gradients: Bytes of the gradients of each layer's parameters.
        mode: Recomputation mode.
        end: The end of the stage.
        samples: Number of samples in a micro-batch.
        saved: Bytes that the stage saves for a micro-batch.
        is_sharded: Whether later gradients are whole too, because earlier ones have been reduced to shards.
        tied: For each parameter that several layers use: bytes of its gradient, and the indices of the layers.
    """
    layers = [piece.split[mode] for piece in pieces]
    arrives = [*(piece.output_bytes for piece in pieces[:-1]), end.output]
    between, for_inputs = 0.0, end.at_loss
    for layer, arrived in zip(reversed(layers), reversed(arrives), strict=True):
        for_inputs = max(for_inputs, between + arrived + layer.for_inputs)
        between += layer.between + layer.of_output * (arrived > 0)  # otherwise it is a message
    between -= end.output + end.loss
    start, done, before = saved + samples * between, 0.0, 0.0
    first = later = Alive(start)
    takes = [0.0, *arrives[:-1]]
    order = [*range(len(layers))]
    if any(layer.in_reverse for layer in layers):
        order.reverse()
    sums, owns = [0.0] * len(layers), [*gradients]
    for size, users in tied:
        at = min(users, key=order.index)
        sums[at] += size * len(users)
        for user in {*users} - {at}:
            owns[user] -= size
    for place in order:
        layer, of_output = layers[place], layers[place].of_output * (arrives[place] > 0)
        for activations, computed, complete, group in layer.for_weights:
            now, arriving = start + samples * activations, computed + sums[place] * (not complete)
            first = max(first, Alive(now, done + arriving + complete), key=sum)
            later = max(later, Alive(now, arriving + (group if complete else before)), key=sum)
        start += samples * (layer.left - takes[place] - of_output)
        done += owns[place]
        before = layer.last_group or before
    return SplitStage(samples * for_inputs, samples * between, first, first if is_sharded else later)
