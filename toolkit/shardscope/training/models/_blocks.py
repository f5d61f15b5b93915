"""The parts of a model that recomputation works on: its blocks, and regions that are cheap to run twice."""

from __future__ import annotations

from collections.abc import Iterable

from torch import nn


class CheapToRecompute(nn.Module):
    """A region of a model that stores much for its backward pass and takes little arithmetic to run again.

    Selective recomputation keeps only the inputs of such a region. Where it ends in a linear layer, that
    layer's product is not computed twice: recomputation stops once the layer's input is back.
    """


def blocks(model: nn.Module) -> list[nn.Module]:
    """The repeated parts of `model`, in order.

    These are the items of its own `nn.ModuleList`s and `nn.Sequential`s; for a model without any, its direct
    children that have parameters; for a model without those either, the model itself.

    Example:
        >>> len(blocks(nn.Sequential(nn.Linear(2, 2), nn.ReLU())))
        2
    """
    if isinstance(model, nn.Sequential):
        return list(model)
    lists = [child for child in model.children() if isinstance(child, nn.ModuleList | nn.Sequential)]
    found = [block for items in lists for block in items.children()] or _with_parameters(model.children())
    return found or [model]


def _with_parameters(modules: Iterable[nn.Module]) -> list[nn.Module]:
    return [module for module in modules if next(module.parameters(), None) is not None]
