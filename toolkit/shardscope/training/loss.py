"""Loss functions and accuracy; each is a mean over the targets that count.

A loss that a job selects by name accepts an output that is a tensor of logits, or an object or mapping with a tensor
``logits``. If the output also has a ``loss``, as in Hugging Face models when their inputs include ``labels``, that loss
is used instead. A ``balance_loss`` of each sequence, which models with experts of the catalogue return in training, is
added: its mean, in which a sequence has the weight of its targets, as in the rest of the loss. A user-defined loss
function receives the model's output unchanged.

A mean over a batch is the mean over its micro-batches only if each has the weight of the targets that count in it (see
`target_counts`); `loss_weights` gives it that weight.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from shardscope.errors import DataError, unknown_name
from shardscope.training.copies import copy_of_callable
from shardscope.training.target_counts import (
    IGNORED,
    Count,
    classes_count,
    elements_count,
    is_sum,
    stated_count,
)
from shardscope.training.tensors_in import tensors_in

Loss = Callable[[Any, Any], Tensor]
Pairing = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]
"""Function from logits and targets to the logits that are compared with targets, and those targets."""

_NEAR = 1e-3
"""Largest relative difference between a model's own loss and the cross-entropy that explains it, under autocast."""
_TINY = 1e-12
_CHUNK_LOGITS = 2**20  # number of logits converted to double precision at a time: 8 MB


def cross_entropy(output: Tensor, target: Tensor) -> Tensor:
    """Return the mean cross-entropy, in nats, for logits `(..., C)` and integer classes `(...)`.

    This is for classification, with shapes `(N, C)` and `(N,)`, and for language models, `(N, T, V)` and `(N, T)`.

    Raises:
        DataError: The shapes do not match, or the targets are not int64.
    """
    _require_classes(output, target)
    return functional.cross_entropy(output.flatten(0, -2), target.flatten())


def mse(output: Tensor, target: Tensor) -> Tensor:
    """Return the mean squared error between two tensors of the same shape.

    Raises:
        DataError: The shapes differ (there is no broadcasting).
    """
    if output.shape != target.shape:
        raise DataError(
            f"loss='mse' got an output of shape {_shape(output)} and a target of shape {_shape(target)}; "
            "make the shapes equal"
        )
    return functional.mse_loss(output, target)


LOSSES: dict[str, Loss] = {"cross-entropy": cross_entropy, "mse": mse}
"""The losses that a job can select by name."""


_COUNTS: dict[str, Count] = {"cross-entropy": classes_count(), "mse": elements_count}


@dataclass(frozen=True)
class ResolvedLoss:
    """A loss function, and how losses of parts of a batch combine to the loss of the batch, as far as that is known.

    Attributes:
        function: The function of output and targets.
        name: Name for error messages.
        count: Function that returns the number of targets over which the mean is taken; None if it is not known.
        is_named: Whether the function is one of `LOSSES`, so that a loss in the model's output replaces it.
        is_sum: Whether the function is a sum over its targets instead of a mean.
        given: The user's own object, which `function` calls; None for one of `LOSSES`.
    """

    function: Loss
    name: str
    count: Count | None
    is_named: bool = False
    is_sum: bool = False
    given: Loss | None = None

    def __call__(self, output: Any, target: Any) -> Tensor:
        return self.function(output, target)

    def copied(self) -> ResolvedLoss | None:
        """Return a copy that shares no state with this loss, to try it; None if the user's object cannot be copied."""
        if self.given is None:
            return self
        try:
            return replace(self, function=_scalar(copy_of_callable(self.given)))
        except Exception:  # noqa: BLE001 - a user's own class may raise any error when it is copied
            return None

    def count_is_of_model(self, value: Tensor, own: Tensor) -> bool:
        """Return whether this loss's `value` is the loss that the model has computed itself."""
        is_same = value is own or bool(value.detach() == own.detach()) or bool(value.isnan() & own.isnan())
        return is_same and (self.is_named or self.count is None) and not self.is_sum

    def count_of(self, output: Any, target: Any, value: Tensor, pairing: Pairing | None) -> float | None:
        """Return the number of targets that count in the loss of this output; None if it is not known.

        Args:
            output: The model's output.
            target: The targets.
            value: The loss.
            pairing: Result of `pairing_of` for the model; None if its own loss cannot be explained.
        """
        own = own_loss(output)
        if own is None or not self.count_is_of_model(value, own):
            return None if self.count is None else self.count(target)
        return None if pairing is None else shifted_count(pairing)(target)


def resolve_loss(loss: str | Loss) -> ResolvedLoss:
    """Return the loss function for a name or a user's function.

    A user's function ``loss(output, target)`` is wrapped, so that a result that is not a scalar tensor raises an error.

    Raises:
        SpecError: No loss has this name.
    """
    if not isinstance(loss, str):
        name = _name(loss)
        return ResolvedLoss(_scalar(loss), name, stated_count(loss, name), is_sum=is_sum(loss), given=loss)
    if loss not in LOSSES:
        raise unknown_name("loss", loss, LOSSES)
    return ResolvedLoss(partial(_named, loss), loss, _COUNTS[loss], is_named=True)


def shifted_count(pairing: Pairing) -> Count:
    """Return the function that counts the targets of a model's own loss, which `pairing` explains."""
    return (lambda target: _CLASSES(target[:, 1:])) if pairing is shifted else _CLASSES


_CLASSES = classes_count()


def may_lack_targets(target: Any) -> bool:
    """Return whether all target classes are ignored; the first of each sequence is left out, as a shifted loss does."""
    if not isinstance(target, Tensor) or not _are_classes(target):
        return False
    return bool((target[:, 1:] if target.dim() == 2 else target).eq(IGNORED).all())


def zero_of(output: Any, index: int) -> Tensor:
    """Return a loss of zero for an output whose targets are all ignored; all gradients through it are zero.

    The mean over no targets is NaN, and so are its gradients. Every tensor of the output contributes, as collectives
    in the backward pass need gradients of the same parameters on every rank.

    Raises:
        DataError: No tensor of the output except its loss requires grad; `index` is the micro-batch index, from 0.
    """
    own = own_loss(output)
    parts = [part for part in tensors_in(output) if part is not own and part.requires_grad]
    if not parts:
        raise DataError(
            f"no target of micro-batch {index + 1} counts, so its loss must be 0, but the model returned no tensor "
            "that requires grad besides its loss; return the logits, not detached, or leave out rows without a target"
        )
    zeros = [part.masked_fill(torch.ones_like(part, dtype=torch.bool), 0).sum() for part in parts]
    return torch.stack([zero.to(zeros[0]) for zero in zeros]).sum()


def pairing_of(
    output: object, target: object, *, counts_first: bool | None = None, near: float = _NEAR
) -> Pairing | None:
    """Determine whether each logit vector of a model predicts the target at its own position or the next one.

    The logits are the output itself or its ``logits``. If the output has a ``loss``, the alignment is the one whose
    cross-entropy is nearest to that loss, if it is near enough; the next position is tried only for a language model.

    Args:
        output: The model's output.
        target: The target classes.
        counts_first: Whether the model's loss counts the first target of each row, if known.
        near: Largest relative difference between the model's loss and the cross-entropy that explains it.

    Returns:
        A function that aligns logits and targets; None if the output has no logits for the target classes, or no
        alignment is accepted.
    """
    scores, own = scores_of(output), own_loss(output)
    if scores is None or not isinstance(target, Tensor) or not _are_classes(target):
        return None
    if own is None:
        return as_given if _fit(scores, target) else None
    pairings = [as_given] if counts_first is not False else []
    if target.dim() == 2 and scores.dim() == 3 and not counts_first:
        pairings.append(shifted)
    apart = {pairing: _distance(own, *pairing(scores, target)) for pairing in pairings}
    nearest = min(pairings, key=lambda pairing: apart[pairing])
    return nearest if apart[nearest] <= near else None


def accuracy(output: object, target: object, *, pairing: Pairing | None = None) -> float | None:
    """Return the fraction of targets whose class has the highest logit; None without logits, or if no target counts."""
    found = hits(output, target, pairing=pairing)
    return found[0] / found[1] if found is not None and found[1] else None


def hits(output: object, target: object, *, pairing: Pairing | None = None) -> tuple[int, int] | None:
    """Return the number of targets whose class has the highest logit, and the number of targets that count.

    The result is None if there are no logits for the classes.

    Args:
        output: The model's output.
        target: The target classes.
        pairing: Result of `pairing_of` for another micro-batch of the same data; None computes it from this output.
    """
    pairing, scores = pairing or pairing_of(output, target), scores_of(output)
    if pairing is None or scores is None or not isinstance(target, Tensor) or not _are_classes(target):
        return None
    scored, classes = pairing(scores, target)
    if not _fit(scored, classes):
        return None
    counted = classes != IGNORED
    return int((scored.argmax(dim=-1) == classes)[counted].sum()), int(counted.sum())


def as_given(scores: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """Align the logits at each position with the target at the same position."""
    return scores, target


def shifted(scores: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """Align the logits at each position with the target at the next position."""
    return scores[:, :-1], target[:, 1:]


def _fit(scores: Tensor, target: Tensor) -> bool:
    has_order = not (scores.is_complex() or scores.dtype == torch.bool)
    return has_order and scores.shape[:-1] == target.shape and 0 not in scores.shape[-1:]


def _distance(loss: Tensor, scores: Tensor, target: Tensor) -> float:
    """Return the relative difference between a loss and the cross-entropy; infinity if there is no cross-entropy."""
    if not _fit(scores, target) or scores.dim() < 2:
        return math.inf
    if not ((target >= 0) & (target < scores.shape[-1]) | (target == IGNORED)).all():
        return math.inf
    total = torch.zeros((), dtype=torch.float64, device=scores.device)
    for part, classes in _few_at_a_time(scores, target):
        total += functional.cross_entropy(part.double(), classes, reduction="sum")
    mean = float(total) / max(1, int((target != IGNORED).sum()))
    apart = abs(mean - float(loss)) / max(abs(mean), _TINY)
    return apart if math.isfinite(apart) else math.inf


def _few_at_a_time(scores: Tensor, target: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield logits and their classes in chunks, so that a double-precision copy of each needs little memory."""
    size = max(1, _CHUNK_LOGITS // scores.shape[-1])
    pairs = [(scores, target)] if scores.dim() == 2 else zip(scores, target, strict=True)
    for some, classes in pairs:
        flat = some.flatten(0, -2)
        yield from zip(flat.split(size), classes.flatten().split(size), strict=True)


def _named(name: str, output: Any, target: Any) -> Tensor:
    own = own_loss(output)
    if own is not None:
        return own
    scores = scores_of(output)
    if scores is None:
        raise DataError(
            f"loss={name!r} requires logits, but the model returned a {type(output).__name__} without logits; "
            "return a tensor from the model, or give a function loss(output, target)"
        )
    if not isinstance(target, Tensor):
        raise DataError(
            f"loss={name!r} got a target of type {type(target).__name__}; "
            "give targets as a tensor, or give a function loss(output, target)"
        )
    loss = LOSSES[name](scores, target)
    balance = _part(output, "balance_loss")  # of a mixture of experts
    return loss + _mean_by_targets(balance, target) if isinstance(balance, Tensor) else loss


def _mean_by_targets(balance: Tensor, target: Tensor) -> Tensor:
    """Return the mean of the sequences' balance losses `(N,)`, weighted by the number of targets that count in each."""
    counts = target.ne(IGNORED).flatten(1).sum(1).to(balance.dtype)
    return (balance * counts).sum() / counts.sum()


def own_loss(output: Any) -> Tensor | None:
    """Return the ``loss`` in the model's output if it is a scalar tensor, else None."""
    loss = _part(output, "loss")
    return loss if isinstance(loss, Tensor) and loss.dim() == 0 else None


def scores_of(output: Any) -> Tensor | None:
    scores = output if isinstance(output, Tensor) else _part(output, "logits")
    return scores if isinstance(scores, Tensor) else None


def _part(output: Any, name: str) -> Any:
    return output.get(name) if isinstance(output, Mapping) else getattr(output, name, None)


def _scalar(loss: Loss) -> Loss:
    def checked(output: Any, target: Any) -> Tensor:
        value = loss(output, target)
        if not isinstance(value, Tensor) or value.dim() > 0:
            got = f"a tensor of shape {_shape(value)}" if isinstance(value, Tensor) else type(value).__name__
            raise DataError(
                f"loss={_name(loss)} returned {got}; return a scalar tensor (without dimensions), such as a mean"
            )
        return value

    return checked


def _require_classes(output: Tensor, target: Tensor) -> None:
    if not _are_classes(target):
        raise DataError(
            f"loss='cross-entropy' got a target of type {target.dtype}; "
            "give integer classes (int64) or use loss='mse'"
        )
    if output.dim() < 2 or output.shape[:-1] != target.shape:
        raise DataError(
            f"loss='cross-entropy' got an output of shape {_shape(output)} "
            f"and a target of shape {_shape(target)}; give a target of shape {tuple(output.shape[:-1])}"
        )


def _are_classes(target: Tensor) -> bool:
    return target.dtype == torch.int64


def _shape(tensor: Tensor) -> tuple[int, ...]:
    return tuple(tensor.shape)


def _name(function: object) -> str:
    return str(getattr(function, "__name__", type(function).__name__))
