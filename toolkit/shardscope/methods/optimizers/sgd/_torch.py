"""torch's own SGD with its fused kernel, which on a CPU is 1.7 to 3 times as fast as torch's loop over tensors."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from shardscope.spec.optimizer import Parameters
from shardscope.training.optim.sparse import prepare_sgd

if TYPE_CHECKING:
    from shardscope.methods.optimizers.sgd import SGD


def build(spec: SGD, parameters: Parameters, *, nesterov: bool) -> torch.optim.Optimizer:
    """Build torch's SGD for `parameters`, with or without Nesterov momentum."""
    settings = spec.settings
    groups = parameters.groups(settings.pop("exclude"), weight_decay=0.0)
    built = torch.optim.SGD(groups, **settings, nesterov=nesterov, fused=parameters.take_fused)
    built.register_step_pre_hook(prepare_sgd)
    return built
