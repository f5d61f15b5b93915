"""What a layer keeps in a backward pass that is split into the gradients of inputs and those of weights."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from math import prod
from typing import Any

import torch
from torch import Tensor, nn

from shardscope.training.memory.activations import Activations


def grown_in_halves(
    layer: nn.Module, inputs: Sequence[Tensor], outputs: Sequence[Tensor], saved: Activations
) -> tuple[int, int, int, int]:
    """Run the two halves of a layer's backward pass, and return the bytes by which the saved bytes grow.

    They are measured at the peak of the first half, after it, at the peak of the second, and after that. The graph of
    the layer stays, as that of all layers but the last in a stage.
    """
    from shardscope.training._compat_pipelining import stage_backward_input, stage_backward_weight

    before = saved.peak = saved.bytes
    ends = [tensor.clone() for tensor in outputs if tensor.requires_grad]  # views cannot be detached
    if not ends:
        return 0, 0, 0, 0
    gradients: list[Tensor] = [torch.empty_like(tensor) for tensor in ends]
    try:
        _, groups = stage_backward_input(ends, gradients, [*inputs], layer.parameters())
        first, between = saved.peak, saved.bytes
        saved.peak = between
        stage_backward_weight(layer.parameters(), groups)
    except (RuntimeError, KeyError):  # no schedule that splits backward passes can train such a layer
        return 0, 0, 0, 0
    return first - before, between - before, saved.peak - before, saved.bytes - before


def delayed_bytes(inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> int:
    """Return the bytes of gradients of the results of operations that take both an input of the layer and a weight.

    PyTorch's split backward pass keeps these until it computes the gradients of weights (``stage_backward_input``).
    """
    feeds: dict[Any, list[Any]] = defaultdict(list)
    waiting = [output.grad_fn for output in outputs]
    seen = {*waiting}
    while waiting:
        node = waiting.pop()
        for other, _ in node.next_functions if node is not None else ():
            if other is not None:
                feeds[other].append(node)
                waiting += [other] * (other not in seen)
                seen.add(other)
    leaves = {id(tensor) for tensor in inputs}
    from_inputs = [node for node in feeds if id(getattr(node, "variable", None)) in leaves]
    reached = {*from_inputs}
    while from_inputs:
        later = [each for each in feeds[from_inputs.pop()] if each not in reached]
        from_inputs += later
        reached |= {*later}
    weighted = {node for other, nodes in feeds.items() if other not in reached for node in nodes} & reached
    results = [result for node in weighted for result in node._input_metadata]  # noqa: SLF001 - nothing else has sizes
    return sum(prod(result.shape) * result.dtype.itemsize for result in results)
