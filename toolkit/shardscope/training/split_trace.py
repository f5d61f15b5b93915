"""What a layer sends and keeps if its backward pass is split into one for inputs and one for weights."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from shardscope.training.data.batches import call
from shardscope.training.memory.activations import Activations
from shardscope.training.memory.ledger import leaf_tensors
from shardscope.training.tensor.axis import Message, recording


class SplitPasses(NamedTuple):
    """The passes of one layer whose backward pass is split; bytes are those by which the saved bytes grow."""

    messages: tuple[Message, ...] = ()
    """Collectives of the forward pass, of the pass for inputs, and of that for weights."""
    for_inputs: int = 0
    """Bytes in the pass for inputs, at most."""
    between: int = 0
    """Bytes after it."""
    for_weights: int = 0
    """Bytes in the pass for weights, at most."""


def split_passes(layer: nn.Module, inputs: Any, saved: Activations) -> SplitPasses | None:
    """Run the passes of a layer whose backward pass is split; None if no schedule can split that of such a layer.

    Its graph stays until the pass for weights, as that of all layers but the last in a stage; that pass has then freed
    all later layers.
    """
    from shardscope.training._compat_pipelining import (
        one_pass_for_weights,
        stage_backward_input,
        stage_backward_weight,
    )

    with recording() as called:
        outputs = [tensor for tensor in leaf_tensors(call(layer, inputs)) if tensor.requires_grad]
        before = saved.peak = saved.bytes
        ends = [tensor.clone() for tensor in outputs]  # views cannot be detached
        if not ends:
            return SplitPasses(tuple(called))
        gradients: list[Tensor] = [torch.empty_like(tensor) for tensor in ends]
        try:
            _, groups = stage_backward_input(ends, gradients, leaf_tensors(inputs), layer.parameters())
            for_inputs, between = saved.peak, saved.bytes
            outputs.clear()
            saved.peak = saved.bytes
            with recording() as late, one_pass_for_weights(layer, groups) as ordered:
                stage_backward_weight(layer.parameters(), ordered)
        except (RuntimeError, KeyError):
            return None
    messages = (*called, *(each._replace(phase="weights") for each in late))
    return SplitPasses(messages, for_inputs - before, between - before, saved.peak - before)


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
