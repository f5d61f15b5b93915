"""Which layers of a model make its result depend on how a batch is cut: they mix samples, or draw random numbers."""

from __future__ import annotations

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.dropout import _DropoutNd


def layers_that_depend_on_the_cut(model: nn.Module) -> dict[str, list[str]]:
    """Return the kinds of such layers, for the ``start`` event; without a field for those that it does not have.

    ``mixes_samples`` has those whose output for a sample depends on the others: batch norms, which take statistics of
    the micro-batch. ``draws`` has those that draw random numbers: dropouts, and layers with a probability of it as an
    attribute, such as recurrent ones.
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
