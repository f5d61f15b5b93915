"""Checks that a model and a loss train the same when each rank of a context group has a part of every sequence."""

from __future__ import annotations

from collections.abc import Mapping
from copy import copy
from typing import Any

import torch
from torch import Tensor, nn

from shardscope.errors import ShardscopeError, SpecError
from shardscope.training.data import Batch, call, map_tensors, num_rows
from shardscope.training.loss import ResolvedLoss, own_loss
from shardscope.training.observe import random_state_kept, unchanged
from shardscope.training.optim.trial import failure_text
from shardscope.training.sequence import SequenceAxis, SequenceSplit
from shardscope.training.strategies._divided import Passes, differ
from shardscope.training.target_counts import Count
from shardscope.training.tensors_in import tensors_in

_HOW = (
    "between attention, which must call torch.nn.functional.scaled_dot_product_attention, every layer must treat each "
    "token by itself, and positions must be torch.arange(T), the first T rows of a parameter or buffer, or inputs"
)


def install_checked(model: nn.Module, split: SequenceSplit, inputs: Any) -> None:
    """Make a model process parts of sequences, and check on one sample that it still trains the same.

    Called by all ranks. Outputs, and the sums over the ranks of the gradients of all parameters for a random gradient
    of the outputs, are compared with those of whole sequences, in fp32 if the weights have fewer bits. A model that
    draws random numbers is compared in evaluation mode.

    Args:
        model: The model, the same on all ranks.
        split: How sequences are divided.
        inputs: Inputs of the model with whole sequences, the same on all ranks.

    Raises:
        SpecError: Sequences cannot be divided, or the ranks together do not compute what one does.
    """
    one = map_tensors(lambda tensor: tensor[:1], inputs) if num_rows(inputs) > 1 else inputs
    own = split.part(one)
    whole = Passes.of(model, one, axis="context")
    is_random = whole.draws
    if is_random:
        whole = Passes.of(model, one, axis="context", in_training=False)
    split.install(model)
    ends = [_part(split, end) for end in whole.ends]
    try:
        parts = Passes.of(model, own, axis="context", ends=ends, in_training=not is_random)
    except ShardscopeError:
        raise
    except Exception as error:  # on all ranks, whose parts have equal shapes
        raise SpecError(
            f"the model fails on parts of sequences ({failure_text(error)}); {_HOW}; or use context=1"
        ) from error
    _require_same(whole, parts, split)


def _part(split: SequenceSplit, whole: Tensor) -> Tensor:
    """Return this rank's part of an output or its gradient; a number, such as a mean loss, is shared by all ranks."""
    return split.part(whole) if whole.dim() > 1 else whole / split.axis.size


def _require_same(whole: Passes, parts: Passes, split: SequenceSplit) -> None:
    """Refuse a division that changes outputs or gradients, on all ranks of the group."""
    small = whole.small
    differs = [True]
    if [each.dim() for each in whole.outputs] == [each.dim() for each in parts.outputs]:
        differs = [_output_differs(*pair, split) for pair in zip(whole.outputs, parts.outputs, strict=True)]
    names = [*whole.gradients]
    sums = [split.axis.total(parts.gradients[name].clone()) for name in names]
    grads = [differ(whole.gradients[name], found, small) for name, found in zip(names, sums, strict=True)]
    device = parts.outputs[0].device if parts.outputs else None
    counts = torch.tensor([any(differs), *grads], dtype=torch.float32, device=device)
    of_outputs, *of_parameters = split.axis.total(counts).tolist()
    first = next((name for name, count in zip(names, of_parameters, strict=True) if count), None)
    if of_outputs or first is not None:
        what = "compute what it does" if of_outputs else f"give parameter {first!r} the gradient that it gets"
        raise SpecError(
            f"the model does not {what} with whole sequences when {split.axis.size} context ranks have parts of them; "
            f"{_HOW}; or use context=1"
        )


def _output_differs(whole: Tensor, part: Tensor, split: SequenceSplit) -> bool:
    if whole.dim() > 1:
        return differ(split.part(whole), part)
    return differ(whole, split.axis.total(part.clone()) / split.axis.size)


def require_loss_by_parts(
    model: nn.Module, loss: ResolvedLoss, count: Count | None, split: SequenceSplit, batch: Batch
) -> None:
    """Refuse a user's loss whose gradient for a sequence is not the mean, or sum, of those for the ranks' parts of it.

    Called by all ranks with the same batch, before the model is divided; nothing is sent. A loss that the model itself
    computes is an output, which `install_checked` compares.

    Args:
        model: The whole model.
        loss: The job's loss.
        count: Function that counts targets, by which ranks weight their means; None for equal weights.
        split: How sequences are divided.
        batch: Inputs and targets with whole sequences.

    Raises:
        SpecError: The loss depends on how sequences are divided.
    """
    trial = None if loss.is_named else loss.copied()
    if trial is None:
        return
    inputs, targets = map_tensors(lambda tensor: tensor[:1], batch)
    with unchanged(model, {}), torch.no_grad():
        output = call(model, inputs)
    leaves = [each for each in tensors_in(output) if each.is_floating_point()]
    if not leaves or own_loss(output) is not None:
        return
    for leaf in leaves:
        leaf.requires_grad_()
    size, sums = split.axis.size, [torch.zeros_like(leaf) for leaf in leaves]
    ranks = [SequenceSplit(SequenceAxis(size, rank), split.comm) for rank in range(size)]
    parts = [(_of_rank(each, output), _of_rank(each, targets)) for each in ranks]
    weights = [1.0 if count is None or trial.is_sum else count(of_rank) for _, of_rank in parts]
    total = 1.0 if trial.is_sum else sum(weights)
    with random_state_kept():
        expected = _loss_gradients(trial, output, targets, leaves)
        for weight, part in zip(weights, parts, strict=True):
            if weight:
                for added, term in zip(sums, _loss_gradients(trial, *part, leaves), strict=True):
                    added.add_(term, alpha=weight / total)
    if total and any(map(differ, expected, sums)):
        raise SpecError(
            f"loss={loss.name!r} of whole sequences is not the mean of its values for the parts of them on "
            f"{size} context ranks; use a mean over tokens, each with its own target (and -100 for those that do not "
            "count, with an attribute count that returns the number of others), plus means of what is the same on all "
            "ranks, such as a balance loss; or context=1"
        )


def _of_rank(split: SequenceSplit, value: Any) -> Any:
    """Return a rank's part of tensors with sequences in an output or in targets; other values unchanged."""
    if isinstance(value, Tensor):
        return split.part(value) if value.dim() > 1 else value
    if isinstance(value, Mapping):
        parts: Any = copy(value)  # of its own class, whose attributes a loss may read
        for key, each in value.items():
            parts[key] = _of_rank(split, each)
        return parts
    return map_tensors(lambda tensor: _of_rank(split, tensor), value)


def _loss_gradients(loss: ResolvedLoss, output: Any, targets: Any, leaves: list[Tensor]) -> list[Tensor]:
    return [*torch.autograd.grad(loss(output, targets), leaves, allow_unused=True, materialize_grads=True)]
