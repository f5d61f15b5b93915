"""torch's own AdamW, and a subclass of it whose second moment can be frozen."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, overload

import torch
from torch import nn

from shardscope.spec.optimizer import Parameters
from shardscope.training.optim.frozen import FrozenVariance, first_correction
from shardscope.training.optim.sparse import refuse_in_step

if TYPE_CHECKING:
    from shardscope.methods.optimizers.adamw import AdamW


def build(spec: AdamW, parameters: Parameters) -> torch.optim.Optimizer:
    """Build torch's AdamW for `parameters`, or `FreezableAdamW` if compression will freeze the second moment."""
    settings = spec.settings
    groups = parameters.groups(settings.pop("exclude"), weight_decay=0.0)
    make = FreezableAdamW if parameters.is_freezable else torch.optim.AdamW
    built = make(groups, **settings, fused=parameters.take_fused)
    built.register_step_pre_hook(refuse_in_step)
    return built


class FreezableAdamW(FrozenVariance, torch.optim.AdamW):
    """torch's AdamW, whose second moment can be frozen.

    After the freeze, step t is ``w -= lr (m / ((1 - b1**t) (sqrt(v / (1 - b2**T)) + eps)) + decay w)``, where m is the
    first moment, v the frozen second moment, b1 and b2 are their decays, and T is the last step before the freeze.
    """

    @overload
    def step(self, closure: None = None) -> None: ...
    @overload
    def step(self, closure: Callable[[], float]) -> float: ...
    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Take one AdamW step; after the freeze, each parameter's `grad` must hold the averaged first moment."""
        if self.frozen_after is None:
            return super().step(closure)  # type: ignore[no-any-return]  # torch's is untyped
        assert closure is None, "a closure would overwrite first moments with gradients"
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    self._frozen_step(param, group)
        return None

    def _frozen_step(self, param: nn.Parameter, group: dict[str, Any]) -> None:
        state = self.state[param]
        state["step"] += 1
        assert param.grad is not None
        state["exp_avg"].copy_(param.grad)
        update = state["exp_avg"] / self._root(state["exp_avg_sq"], group)
        param.mul_(1 - group["lr"] * group["weight_decay"])
        param.sub_(update.mul_(group["lr"] / first_correction(group, state["step"])))
