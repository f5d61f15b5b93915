"""Layers whose result depends on how a batch is split, because they mix samples or draw random numbers."""

from __future__ import annotations

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.dropout import _DropoutNd


def layers_that_depend_on_the_cut(model: nn.Module) -> dict[str, list[str]]:
    """Return the types of the layers whose result depends on how a batch is split, for the ``start`` event.

    ``mixes_samples`` lists layers whose output for one sample depends on the other samples: batch normalization.
    ``draws`` lists layers that draw random numbers: dropout layers, layers with a dropout probability as an attribute,
    such as recurrent layers, and randomized leaky ReLUs. A field is left out if the model has no such layers.
    """
    kinds = {"mixes_samples": lambda part: isinstance(part, _BatchNorm), "draws": _draws}
    found = {
        field: sorted({type(part).__name__ for part in model.modules() if is_such(part)})
        for field, is_such in kinds.items()
    }
    return {field: names for field, names in found.items() if names}


def _draws(part: nn.Module) -> bool:
    if isinstance(part, _DropoutNd):
        return part.p > 0
    rates = [value for name, value in vars(part).items() if "dropout" in name]
    return isinstance(part, nn.RReLU) or any(isinstance(rate, float) and rate > 0 for rate in rates)
