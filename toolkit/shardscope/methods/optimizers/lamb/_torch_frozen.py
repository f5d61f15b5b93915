"""LAMB whose second moment can be frozen, as in 1-bit LAMB (Li et al. 2021, arXiv 2104.06069, Algorithm 1).

Before the freeze, each layer's trust ratio is averaged over the steps, starting with the first step in which both
weights and update have non-zero norms. After the freeze, a fresh second moment is kept in addition to the frozen one;
it is computed from gradients that are reconstructed from the averaged first moments. The averaged ratio is multiplied
by a factor. For each element, the root of the frozen second moment is divided by the root of the fresh second moment;
the factor is the largest of these quotients in the layer, within bounds.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from shardscope.errors import SpecError
from shardscope.methods.optimizers.lamb._torch import TorchLamb
from shardscope.training.optim._kernels import Scalars, sums_of_squares
from shardscope.training.optim._layerwise import LayerBatch, LayerShard, Staged, total_squares
from shardscope.training.optim.frozen import (
    FrozenVariance,
    corrected_root,
    first_correction,
    weight_of_gradient,
)
from shardscope.training.optim.signals import Squares, UpdatedLayers

AVERAGE_DECAY = 0.9
"""Decay per step of the averaged ratio; this value and the bounds below are as published."""
FACTOR_RANGE = (0.5, 4.0)
"""Bounds of a layer's factor."""
FACTOR_CHANGE = 0.1
"""Largest relative change of a layer's factor in one step."""


class FreezableLamb(FrozenVariance, TorchLamb):
    """Our LAMB, whose second moment can be frozen; for unsharded tensors only.

    After the freeze, each layer moves by ``-lr * averaged ratio * factor * u``, where ``u`` is computed with the frozen
    second moment. The averaged ratio already includes the bound `clamp`; `trust_clip` also bounds the product of ratio
    and factor. Layers without trust ratios have no factor.
    """

    def freeze(self, after: int) -> None:
        """Freeze the second moment in its current state, the state after step `after`.

        Raises:
            SpecError: `max_grad_norm` is set, although there are no gradients to clip after the freeze.
        """
        if self.max_grad_norm is not None:
            raise SpecError(
                f"max_grad_norm={self.max_grad_norm!r} clips gradients, but LAMB receives first moments instead of "
                "gradients once its second moment is frozen; use max_grad_norm=None"
            )
        super().freeze(after)

    def _new_state(self, param: Tensor, group: dict[str, Any]) -> dict[str, Tensor]:
        return {
            **super()._new_state(param, group),
            "exp_avg_sq_fresh": torch.zeros_like(param),
            "ratio": torch.zeros((), dtype=torch.float32, device=param.device),  # 0 until the first ratio
            "factor": torch.ones((), dtype=torch.float32, device=param.device),
        }

    def _kernels_for(self, batches: list[LayerBatch]) -> None:
        """Return None, because the kernels support neither averaged ratios nor frozen second moments."""

    def _stage(self, batch: LayerBatch) -> Staged:
        if self.frozen_after is None:
            return super()._stage(batch)
        updates = self._scratch.take(batch)
        for layer, update in zip(batch.layers, updates, strict=True):
            self._advance(layer, update, batch.group)
        is_asked = self.is_watched and batch.group["adapt"]
        squares = [*sums_of_squares(batch.weights), *sums_of_squares(updates)] if is_asked else []
        return Staged(batch, updates, total_squares(squares, len(batch.layers)))

    def _move(self, staged: Staged, squares: Squares | None) -> None:
        layers, group = staged.batch.layers, staged.batch.group
        if self.frozen_after is None:
            super()._move(staged, squares)
            if squares is not None:
                ratios = self._last[-1].ratios
                assert ratios is not None
                _average(layers, ratios, squares)
            return
        ratios = self._frozen_ratios(layers, group) if group["adapt"] else None
        bounds = self._frozen_bounds(layers, group) if squares is not None else None
        self._last.append(UpdatedLayers([layer.name for layer in layers], group, squares, ratios, bounds))
        self._apply(staged, ratios)

    def _frozen_bounds(self, layers: list[LayerShard], group: dict[str, Any]) -> list[str | None]:
        """Return the bound that limits each layer's ratio: ``trust_clip``, ``factor`` (at its limit), or None."""
        low, high = FACTOR_RANGE
        bounds: list[str | None] = []
        for layer in layers:
            average, factor = float(_averaged(layer)), float(layer.state["factor"])
            is_clipped = group["trust_clip"] and average * factor > 1
            bounds.append("trust_clip" if is_clipped else None if low < factor < high else "factor")
        return bounds

    def _frozen_ratios(self, layers: list[LayerShard], group: dict[str, Any]) -> Scalars:
        bound = 1.0 if group["trust_clip"] else float("inf")
        ratios = torch.cat([(_averaged(layer) * layer.state["factor"]).view(1) for layer in layers])
        bounded = ratios.double().clamp(max=bound)
        return bounded.tolist() if bounded.is_cpu else bounded

    def _advance(self, layer: LayerShard, update: Tensor, group: dict[str, Any]) -> None:
        """Copy the new first moment, held by the layer's `.grad`, to its state, and write ``-u`` to `update`."""
        state, decay = layer.state, group["weight_decay"]
        self._refresh(layer, group)
        state["exp_avg"].copy_(layer.grad)
        bare = state["exp_avg"] / self._root(state["exp_avg_sq"], group)
        bare.div_(first_correction(group, state["step"]).to(bare))
        torch.neg(bare, out=update)
        if group["decay_form"] == "inside":
            update.sub_(layer.weights, alpha=decay)
        elif decay:
            layer.weights.add_(layer.weights, alpha=-group["lr"] * decay)
        if group["adapt"]:
            share = (bare.norm() / update.norm()).nan_to_num(1.0).clamp(max=1.0)
            self._follow(state, share, group)

    def _refresh(self, layer: LayerShard, group: dict[str, Any]) -> None:
        """Update the fresh second moment with the gradient that is reconstructed from the new first moment."""
        state, (beta1, beta2) = layer.state, group["betas"]
        fresh = state["exp_avg_sq_fresh"]
        if float(state["step"]) == self._first_frozen_step:
            fresh.copy_(state["exp_avg_sq"])
        gradient = torch.sub(layer.grad, state["exp_avg"], alpha=beta1).div_(weight_of_gradient(group))
        fresh.mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)

    @property
    def _first_frozen_step(self) -> int:
        assert self.frozen_after is not None
        return self.frozen_after + 1

    def _follow(self, state: dict[str, Tensor], share: Tensor, group: dict[str, Any]) -> None:
        """Update the layer's factor; `share` is the update norm without weight decay over the norm with decay."""
        fresh = corrected_root(state["exp_avg_sq_fresh"], group, float(state["step"]))
        frozen = self._root(state["exp_avg_sq"], group)
        quotient = frozen.div_(fresh).masked_fill_(state["exp_avg_sq"] == 0, 0.0).amax()
        last = state["factor"]
        wanted = (quotient * share + (1 - share)).clamp(*FACTOR_RANGE).to(last)
        last.copy_(wanted.clamp(min=last * (1 - FACTOR_CHANGE), max=last * (1 + FACTOR_CHANGE)))


def _average(layers: list[LayerShard], ratios: Scalars, squares: Squares) -> None:
    """Update the averaged ratio of each layer whose weights and update both have non-zero norms.

    In the first step of a bias that starts at zero, the ratio is undefined, and 1 is used instead. As in the authors'
    code, the average does not include this 1, because it is about a hundred times as large as the other ratios, and
    would dominate the average throughout a short warm-up.
    """
    for layer, ratio, of_weights, of_update in zip(layers, ratios, *squares, strict=True):
        held = layer.state["ratio"]
        kept = torch.where(held > 0, AVERAGE_DECAY, 0.0)
        has_norm = torch.as_tensor((of_weights > 0) & (of_update > 0), device=held.device)
        held.copy_(torch.where(has_norm, kept * held + (1 - kept) * ratio, held))


def _averaged(layer: LayerShard) -> Tensor:
    """Return the averaged ratio of a layer; 1 before its first ratio."""
    held = layer.state["ratio"]
    return torch.where(held > 0, held, 1.0)
