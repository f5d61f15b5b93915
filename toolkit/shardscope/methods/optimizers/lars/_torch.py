"""LARS: momentum SGD with each layer's step scaled to the norm of the layer's weights.

You, Gitman and Ginsburg, Large batch training of convolutional networks (2017), equations 5 and 6. For a layer with
weights ``w`` and gradient ``g``, the update is ``u = g + decay * w``. The trust ratio, which the paper calls the local
learning rate, is ``trust_coefficient * |w| / (|g| + decay * |w|)``.
"""
# ruff: noqa: SLF001 - torch documents its foreach operations under these names

from __future__ import annotations

import math
import sys
from typing import Any, Literal

import torch
from torch import Tensor

from shardscope.training.optim._checks import check_choice, check_fraction, check_non_negative
from shardscope.training.optim._kernels import Number, Scalars, add_scaled_, at_most, sums_of_squares
from shardscope.training.optim._layerwise import (
    LayerBatch,
    LayerwiseOptimizer,
    Staged,
    total_squares,
)
from shardscope.training.optim.signals import Squares
from shardscope.training.sharding import ReduceSquares

MomentumForm = Literal["classic", "torch", "post"]


class TorchLars(LayerwiseOptimizer):
    """LARS, with options that cover the differences between published versions; the defaults are those of the paper.

    With the velocity ``v``, the momentum ``m``, the trust ratio ``q`` and the update ``u`` (gradient plus weight
    decay), a step is

    - classic: ``v = m v + lr q u``, ``w -= v``;
    - torch: ``v = m v + q u``, ``w -= lr v``, which differs from classic when the learning rate changes;
    - post: ``v = m v + u``, ``w -= lr q v``, with the norm of ``v`` in the ratio.

    Args:
        params: Parameters, named parameters, or groups of either.
        lr: Learning rate, at least 0.
        momentum: Decay of the velocity per step, in [0, 1); with 0, no velocity is kept.
        weight_decay: Weight decay, at least 0. It is added to the gradient, so the ratio scales it too.
        eps: Constant that is added to the denominator of the trust ratio, at least 0.
        trust_coefficient: Size of a layer's step at ``lr=1``, relative to the layer's weight norm, at least 0.
        momentum_form: Where learning rate and trust ratio are applied; see above.
        norm_of: Denominator of the trust ratio: ``sum`` for ``|g + decay w|``, or ``parts`` for ``|g| + decay |w|``.
            Has no effect with ``post``.
        nesterov: Step along ``m v + u`` instead of ``v``, with learning rate and ratio applied as in `momentum_form`.
        trust_clip: LARC: use ``q`` directly as the learning rate of the layer, with `lr` as its upper bound.
        adapt: Whether to use trust ratios; False is meant for individual parameter groups, such as biases and norms.
        reduce_squares: Function that sums the layers' squared norms over ranks, for sharded tensors; called once per
            step.

    Raises:
        SpecError: An option is out of range.
    """

    method = "lars"

    def __init__(
        self,
        params: Any,
        lr: float = 1.0,
        *,
        momentum: float = 0.9,
        weight_decay: float = 1e-4,
        eps: float = 0.0,
        trust_coefficient: float = 1e-3,
        momentum_form: MomentumForm = "classic",
        norm_of: Literal["sum", "parts"] = "parts",
        nesterov: bool = False,
        trust_clip: bool = False,
        adapt: bool = True,
        reduce_squares: ReduceSquares | None = None,
    ) -> None:
        defaults = {
            "lr": lr,
            "momentum": momentum,
            "weight_decay": weight_decay,
            "eps": eps,
            "trust_coefficient": trust_coefficient,
            "momentum_form": momentum_form,
            "norm_of": norm_of,
            "nesterov": nesterov,
            "trust_clip": trust_clip,
            "adapt": adapt,
        }
        super().__init__(params, defaults, reduce_squares=reduce_squares)
        for group in self.param_groups:
            check_non_negative(group, "lr", "weight_decay", "eps", "trust_coefficient")
            check_fraction(group, "momentum")
            check_choice("momentum_form", group["momentum_form"], ("classic", "torch", "post"))
            check_choice("norm_of", group["norm_of"], ("sum", "parts"))

    def _new_state(self, param: Tensor, group: dict[str, Any]) -> dict[str, Tensor]:
        return {"momentum_buffer": torch.zeros_like(param)} if group["momentum"] else {}

    def _stage(self, batch: LayerBatch) -> Staged:
        group = batch.group
        directions = self._decayed_grads(batch)
        if group["momentum_form"] == "post":
            directions = self._with_momentum(batch, directions)
        if not group["adapt"]:
            return Staged(batch, directions, None)
        divisors = batch.grads if _divides_by_parts(group) else directions
        return Staged(batch, directions, _squares([*batch.weights, *divisors], len(batch.layers)))

    def _decayed_grads(self, batch: LayerBatch) -> list[Tensor]:
        """Return the updates ``g + decay * w``; without weight decay, return the gradients themselves."""
        decay = batch.group["weight_decay"]
        if not decay:
            return batch.grads
        out = self._scratch.take(batch)
        for target, grad, weights in zip(out, batch.grads, batch.weights, strict=True):
            torch.add(grad, weights, alpha=decay, out=target)
        return out

    def _with_momentum(self, batch: LayerBatch, directions: list[Tensor]) -> list[Tensor]:
        """Add the updates to the velocities, without scaling (``post``), and return the directions of the steps."""
        momentum = batch.group["momentum"]
        if not momentum:
            return directions
        velocities = batch.column("momentum_buffer")
        torch._foreach_mul_(velocities, momentum)
        torch._foreach_add_(velocities, directions)
        if not batch.group["nesterov"]:
            return velocities
        return list(torch._foreach_add(directions, velocities, alpha=momentum))

    def _divisor(self, weight_norm: Number, update_norm: Number, group: dict[str, Any]) -> Number:
        return update_norm + group["weight_decay"] * weight_norm if _divides_by_parts(group) else update_norm

    def _ratio(self, weight_norm: Number, divisor: Number, group: dict[str, Any]) -> Number:
        ratio: Number = group["trust_coefficient"] * weight_norm / (divisor + group["eps"])
        if group["trust_clip"]:
            # avoid division by 0: a schedule may start from a learning rate of 0
            ratio = at_most(ratio / max(group["lr"], sys.float_info.min), 1.0)
        return ratio

    def _bound(self, weight_norm: float, divisor: float, group: dict[str, Any]) -> str | None:
        own_rate = group["trust_coefficient"] * weight_norm / (divisor + group["eps"])
        return "trust_clip" if group["trust_clip"] and own_rate > group["lr"] else None

    def _apply(self, staged: Staged, ratios: Scalars | None) -> None:
        batch, group = staged.batch, staged.batch.group
        if ratios is None:
            ratios = _ones_like(batch.weights)
        lr, momentum, form = group["lr"], group["momentum"], group["momentum_form"]
        if form == "post" or not momentum:
            add_scaled_(batch.weights, staged.directions, -lr, ratios)
            return
        inside, outside = (lr, 1.0) if form == "classic" else (1.0, lr)
        velocities = batch.column("momentum_buffer")
        torch._foreach_mul_(velocities, momentum)
        add_scaled_(velocities, staged.directions, inside, ratios)
        torch._foreach_add_(
            batch.weights, velocities, alpha=-outside * (momentum if group["nesterov"] else 1)
        )
        if group["nesterov"]:
            add_scaled_(batch.weights, staged.directions, -outside * inside, ratios)


def _squares(columns: list[Tensor], num_layers: int) -> Squares | None:
    """Return the squared norms of weights and denominators; on a CPU, in float64 if float32 overflows."""
    squares = total_squares(list(sums_of_squares(columns)), num_layers)
    if squares is None or isinstance(squares[0], Tensor) or math.isfinite(sum(map(sum, squares))):
        return squares
    return total_squares(list(sums_of_squares([tensor.double() for tensor in columns])), num_layers)


def _divides_by_parts(group: dict[str, Any]) -> bool:
    return bool(group["norm_of"] == "parts" and group["momentum_form"] != "post")


def _ones_like(tensors: list[Tensor]) -> Scalars:
    """Return a trust ratio of 1 for each tensor, for layers that do not use trust ratios."""
    if tensors[0].is_cpu:
        return [1.0] * len(tensors)
    return torch.ones(len(tensors), dtype=torch.float64, device=tensors[0].device)
