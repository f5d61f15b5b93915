"""Determines which targets a loss counts, by calling it on a few rows before training.

A named loss, and a user's function that returns ``output.loss``, take the loss that the model computes itself; how the
model pairs logits and labels determines which labels count. Any other loss without a count is compared with its values
for two parts of the rows.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from shardscope.training.data import map_tensors, num_rows
from shardscope.training.data.batches import LABELS, Batch, call
from shardscope.training.loss import (
    Pairing,
    ResolvedLoss,
    as_given,
    own_loss,
    pairing_of,
    scores_of,
    shifted,
    shifted_count,
)
from shardscope.training.observe import random_state_kept, unchanged
from shardscope.training.target_counts import IGNORED, Count
from shardscope.training.twin import twin_of

_NEAR, _NEAR_EXACT = 1e-4, 1e-5
"""Largest relative differences due to rounding: for a user's loss, and for a model's own loss without autocast."""
_NEAR_OF = {torch.float64: 1e-7, torch.float16: 1e-2, torch.bfloat16: 6e-2}
"""Largest relative differences due to rounding for losses in other dtypes than fp32."""
_OWN = (
    "the model's own loss is not the mean cross-entropy over its labels, so it is not known how many labels count: all "
    "micro-batches and ranks have equal weights; give a function as loss whose attribute count returns their number"
)
_CUT = (
    "{loss} of some rows is not the mean of its values for parts of them, so the result depends on how "
    "the batch is split into micro-batches and among ranks, which all have equal weights; {do}"
)
_STATE_IT = (
    "set its attribute count to a function that returns the number of targets that count, or reduction='sum' if it is "
    "a sum"
)
_GIVE_ONE = "give a function as loss whose attribute count returns how many labels count"
_NO_SUM = (
    "loss={name!r} has reduction='sum', but its value for some rows is not the sum of its values for "
    "parts of them, so the result depends on how the batch is split into micro-batches and among ranks; "
    "set reduction='mean' if it is a mean, and "
    "its attribute count to a function that returns the number of targets that count"
)
_UNKNOWN = (
    "some targets are -100, but it is not known how many count in loss={name!r}: all micro-batches and ranks have "
    "equal weights; set its attribute count to a function that returns the number of targets that count"
)


@dataclass(frozen=True)
class Trial:
    """Result of a trial.

    Attributes:
        count: Function that counts the targets; None if it is not known.
        note: Warning for the user, in a sentence; None if there is none.
        is_own: Whether the loss is one that the model computes itself.
        pairing: How the model pairs logits and labels, if the loss is its own; None if that is not known.
        failed: Whether the model or the loss raised an error.
    """

    count: Count | None
    note: str | None = None
    is_own: bool = False
    pairing: Pairing | None = None
    failed: bool = False

    @property
    def verdict(self) -> str:
        """One of `VERDICTS`, which all ranks must agree on."""
        if self.failed:
            return "the model or loss could not be tried"
        if not self.is_own:
            return "the loss is not the model's own"
        if self.pairing is None:
            return "the model's own loss, whose targets cannot be counted"
        at = "next" if self.pairing is shifted else "same"
        return f"the model's own loss of targets at the {at} position"


VERDICTS = tuple(
    trial.verdict
    for trial in (
        Trial(None, failed=True), Trial(None), Trial(None, is_own=True),
        Trial(None, is_own=True, pairing=as_given), Trial(None, is_own=True, pairing=shifted),
    )
)  # fmt: skip
"""All possible results of a trial, in words."""


def tried(loss: ResolvedLoss, model: nn.Module, example: Batch, *, leaves_out: bool) -> Trial:
    """Try a loss on a few rows, which include two with different numbers of targets if possible.

    Args:
        loss: The loss.
        model: The whole model.
        example: The rows.
        leaves_out: Whether some target of the data may be -100.
    """
    inputs, targets = example
    tryable = loss.copied()
    if tryable is None:
        return Trial(loss.count, _unknown(loss, targets))
    loss, output = tryable, _output(model, inputs)
    value, own = _value(loss, output, targets), own_loss(output)
    if value is None:  # training reports what is wrong
        return Trial(loss.count, failed=True)
    if own is not None and loss.count_is_of_model(value, own):
        pairing = _pairing_by_trial(model, inputs, output) or pairing_of(output, targets, near=_NEAR_EXACT)
        if pairing is None:
            note = _OWN if leaves_out else _told_apart(loss, model, example, is_own=True)
            return Trial(None, note, is_own=True)
        return Trial(shifted_count(pairing), is_own=True, pairing=pairing)
    if loss.count is not None:
        return Trial(loss.count)
    return Trial(None, _told_apart(loss, model, example))


def _pairing_by_trial(model: nn.Module, inputs: Any, output: Any) -> Pairing | None:
    """Return how a model pairs logits and labels, from its losses for artificial labels.

    In one call all labels count, in another only the first of each row. The data's own labels may not suffice: in a few
    rows none may count, and before training all classes have about the same loss.
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


def _told_apart(loss: ResolvedLoss, model: nn.Module, example: Batch, *, is_own: bool = False) -> str | None:
    """Return a note if a loss is not the mean (or sum, if declared so) of its values for two parts of the rows."""
    inputs, targets = example
    rows = num_rows(inputs)
    first = max(1, rows // 3)
    whole, *parts = [
        _value_of_part(loss, model, example, at) for at in (slice(rows), slice(first), slice(first, rows))
    ]
    if whole is None or not whole.isfinite() or None in parts:
        return _unknown(loss, targets)
    one, other = (float(part) for part in parts if part is not None)
    expected = one + other if loss.is_sum else (one * first + other * (rows - first)) / rows
    near = _NEAR_OF.get(whole.dtype, _NEAR)
    if abs(expected - float(whole)) <= near * abs(float(whole)) or _is_random(loss, model, example, whole):
        return None
    if loss.is_sum:
        return _NO_SUM.format(name=loss.name)
    named = ("the model's own loss", _GIVE_ONE) if is_own else (f"loss={loss.name!r}", _STATE_IT)
    return _CUT.format(loss=named[0], do=named[1])


def _value_of_part(loss: ResolvedLoss, model: nn.Module, example: Batch, at: slice) -> Tensor | None:
    """Return the loss of some of the rows; None if it cannot be computed."""
    cut = partial(_cut, at=at, rows=num_rows(example[0]))
    try:
        inputs, targets = map_tensors(cut, example)
    except ValueError:
        return None
    return _value(loss, _output(model, inputs), targets)


def _is_random(loss: ResolvedLoss, model: nn.Module, example: Batch, value: Tensor) -> bool:
    """Return whether the loss of the same rows changes with the random seed."""
    with random_state_kept():
        torch.manual_seed(torch.initial_seed() + 1)
        again = _value_of_part(loss, model, example, slice(None))
    return again is None or not torch.equal(again, value)


def _unknown(loss: ResolvedLoss, targets: Any) -> str | None:
    has_ignored = isinstance(targets, Tensor) and bool((targets == IGNORED).any())
    return _UNKNOWN.format(name=loss.name) if has_ignored and loss.count is None and not loss.is_sum else None


def _value(loss: ResolvedLoss, output: Any, targets: Any) -> Tensor | None:
    """Return the loss; None if it cannot be computed."""
    try:
        with torch.no_grad(), random_state_kept():
            return loss(output, targets)
    except Exception:  # noqa: BLE001 - training reports what is wrong
        return None


def _cut(tensor: Tensor, *, at: slice, rows: int) -> Tensor:
    if tensor.dim() == 0 or len(tensor) != rows:
        raise ValueError("not a tensor with one row per sample")
    return tensor[at]


def _output(model: nn.Module, inputs: Any) -> Any:
    """Return the model's output in evaluation mode, without effects on the model; None if it cannot be computed."""
    try:
        module = twin_of(model) or model
        with torch.no_grad(), unchanged(module, {}):
            return call(module.eval(), inputs)
    except Exception:  # noqa: BLE001 - training reports what is wrong
        return None
