"""Loss functions and accuracy; each is a mean over the rows of its arguments.

A loss that a job selects by name accepts an output that is a tensor of logits, or an object or mapping with a tensor
``logits``. If the output also has a ``loss``, as in Hugging Face models when their inputs include ``labels``, that loss
is used instead. A user-defined loss function receives the model's output unchanged.

All micro-batches and all ranks have equal numbers of rows, so averaging their losses gives the mean over the batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from shardscope.errors import DataError, unknown_name

Loss = Callable[[Any, Any], Tensor]
Pairing = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]
"""Function from logits and targets to the logits that are compared with targets, and those targets."""

_CHUNK_LOGITS = 2**20  # number of logits converted to double precision at a time: 8 MB
_IGNORED = -100  # the target that PyTorch's cross-entropy ignores


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


def resolve_loss(loss: str | Loss) -> Loss:
    """Return the loss function for a name or a user's function.

    A user's function ``loss(output, target)`` is wrapped, so that a result that is not a scalar tensor raises an error.

    Raises:
        SpecError: No loss has this name.
    """
    if not isinstance(loss, str):
        return _scalar(loss)
    if loss not in LOSSES:
        raise unknown_name("loss", loss, LOSSES)
    return partial(_named, loss)


def pairing_of(output: object, target: object) -> Pairing | None:
    """Determine whether each logit vector of a model predicts the target at its own position or the next one.

    The logits are the output itself or its ``logits``. If the output has a ``loss``, each alignment is accepted only if
    its cross-entropy equals that loss; the next position is tried only for a language model.

    Returns:
        A function that aligns logits and targets; None if the output has no logits for the target classes, or no
        alignment is accepted.
    """
    scores, own = _scores(output), _own_loss(output)
    if scores is None or not isinstance(target, Tensor) or not _are_classes(target):
        return None
    if own is None:
        return _as_given if _fit(scores, target) else None
    pairings = (_as_given, _shifted) if target.dim() == 2 and scores.dim() == 3 else (_as_given,)
    for pairing in pairings:
        scored, classes = pairing(scores, target)
        if _fit(scored, classes) and _is_cross_entropy(own, scored, classes):
            return pairing
    return None


def accuracy(output: object, target: object, *, pairing: Pairing | None = None) -> float | None:
    """Return the fraction of targets whose class has the highest logit; None if there are no logits for the classes.

    Args:
        output: The model's output.
        target: The target classes.
        pairing: Result of `pairing_of` for another micro-batch of the same data; None computes it from this output.
    """
    pairing, scores = pairing or pairing_of(output, target), _scores(output)
    if pairing is None or scores is None or not isinstance(target, Tensor) or not _are_classes(target):
        return None
    scored, classes = pairing(scores, target)
    return _hits(scored, classes) if _fit(scored, classes) else None


def _as_given(scores: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    return scores, target


def _shifted(scores: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """Align the logits at each position with the target at the next position."""
    return scores[:, :-1], target[:, 1:]


def _fit(scores: Tensor, target: Tensor) -> bool:
    has_order = not (scores.is_complex() or scores.dtype == torch.bool)
    return has_order and scores.shape[:-1] == target.shape and 0 not in scores.shape[-1:]


def _is_cross_entropy(loss: Tensor, scores: Tensor, target: Tensor) -> bool:
    if scores.dim() < 2 or not ((target >= 0) & (target < scores.shape[-1]) | (target == _IGNORED)).all():
        return False
    total = torch.zeros((), dtype=torch.float64, device=scores.device)
    for part, classes in _few_at_a_time(scores, target):
        total += functional.cross_entropy(part.double(), classes, reduction="sum")
    return bool(torch.isclose(total / (target != _IGNORED).sum(), loss.double(), rtol=1e-3))


def _few_at_a_time(scores: Tensor, target: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield logits and their classes in chunks, so that a double-precision copy of each needs little memory."""
    size = max(1, _CHUNK_LOGITS // scores.shape[-1])
    pairs = [(scores, target)] if scores.dim() == 2 else zip(scores, target, strict=True)
    for some, classes in pairs:
        flat = some.flatten(0, -2)
        yield from zip(flat.split(size), classes.flatten().split(size), strict=True)


def _hits(scores: Tensor, target: Tensor) -> float | None:
    counted = target != _IGNORED
    return (scores.argmax(dim=-1) == target)[counted].double().mean().item() if counted.any() else None


def _named(name: str, output: Any, target: Any) -> Tensor:
    own = _own_loss(output)
    if own is not None:
        return own
    scores = _scores(output)
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
    return LOSSES[name](scores, target)


def _own_loss(output: Any) -> Tensor | None:
    """Return the ``loss`` in the model's output if it is a scalar tensor, else None."""
    loss = _part(output, "loss")
    return loss if isinstance(loss, Tensor) and loss.dim() == 0 else None


def _scores(output: Any) -> Tensor | None:
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
