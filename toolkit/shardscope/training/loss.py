"""Losses and accuracy: means over the rows they are given.

A mean over equal parts is the mean of the parts' means, so micro-batches and ranks of equal size average to
the loss of the whole batch.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional

from shardscope.errors import DataError, unknown_name

Loss = Callable[[Tensor, Tensor], Tensor]


def cross_entropy(output: Tensor, target: Tensor) -> Tensor:
    """Mean cross-entropy in nats of scores `(..., C)` against integer classes `(...)`.

    Takes images `(N, C)` with `(N,)` and tokens `(N, T, V)` with `(N, T)` alike.

    Raises:
        DataError: The shapes do not fit, or the target is not of integers.
    """
    _require_classes(output, target)
    return functional.cross_entropy(output.flatten(0, -2), target.flatten())


def mse(output: Tensor, target: Tensor) -> Tensor:
    """Mean squared error between two tensors of one shape.

    Raises:
        DataError: The shapes differ (nothing is broadcast).
    """
    if output.shape != target.shape:
        raise DataError(
            f"loss='mse' got an output of shape {_shape(output)} and a target of shape {_shape(target)}; "
            "make the shapes equal"
        )
    return functional.mse_loss(output, target)


LOSSES: dict[str, Loss] = {"cross-entropy": cross_entropy, "mse": mse}
"""Every loss that a job can name."""


def resolve_loss(loss: str | Loss) -> Loss:
    """The loss of this name, or the user's own callable of output and target, checked at each call.

    Raises:
        SpecError: There is no such loss.
    """
    if not isinstance(loss, str):
        return _scalar(loss)
    if loss not in LOSSES:
        raise unknown_name("loss", loss, LOSSES)
    return LOSSES[loss]


def accuracy(output: Tensor, target: Tensor) -> float | None:
    """The share of targets that score highest, in [0, 1]; None for a regression."""
    if not _are_classes(target) or output.shape[:-1] != target.shape:
        return None
    return (output.argmax(dim=-1) == target).double().mean().item()


def _scalar(loss: Loss) -> Loss:
    def checked(output: Tensor, target: Tensor) -> Tensor:
        value = loss(output, target)
        if not isinstance(value, Tensor) or value.dim() > 0:
            got = f"a tensor of shape {_shape(value)}" if isinstance(value, Tensor) else type(value).__name__
            raise DataError(
                f"loss={_name(loss)} returned {got}; return a tensor of one number, such as a mean"
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
