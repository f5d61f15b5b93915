"""Build the torch optimizer for LAMB from its settings."""

from __future__ import annotations

from typing import TYPE_CHECKING

from shardscope.methods.optimizers.lamb._torch import TorchLamb
from shardscope.methods.optimizers.lamb._torch_frozen import FreezableLamb
from shardscope.spec.optimizer import Parameters

if TYPE_CHECKING:
    from shardscope.methods.optimizers.lamb import Lamb


def build(spec: Lamb, parameters: Parameters) -> TorchLamb:
    """Build our LAMB for `parameters`, or `FreezableLamb` if compression will freeze the second moment."""
    settings = spec.settings
    del settings["variant"]
    groups = parameters.groups(settings.pop("exclude"), weight_decay=0.0, adapt=False)
    adapts = settings.pop("adapt_undecayed") or settings["weight_decay"] > 0
    for bound in ("clamp", "max_grad_norm"):
        settings[bound] = None if settings[bound] == "off" else settings[bound]
    make = FreezableLamb if parameters.is_freezable else TorchLamb
    return make(
        groups, **settings, adapt=adapts, reduce_squares=parameters.reduce_squares,
        reduce_grad_square=parameters.reduce_grad_square, duplicate_grad_params=parameters.duplicate_grad_params,
    )  # fmt: skip
