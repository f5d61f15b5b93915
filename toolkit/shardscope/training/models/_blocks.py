"""The parts of a model: blocks and cheap regions for recomputation, and pieces for pipeline stages."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable

from torch import Tensor, nn


class CheapToRecompute(nn.Module):
    """A region of a model that stores much for its backward pass and needs little arithmetic to recompute.

    Selective recomputation keeps only the region's inputs. If the region ends in a linear layer, that layer's
    product is not computed twice: recomputation stops after the layer's input has been restored.
    """


class ForwardPart(nn.Module):
    """Wraps a piece of a model's forward pass as a module, so that the model can be cut into stages.

    Args:
        function: Maps the piece's input to its output; usually a method of the model.
        uses: The modules whose parameters the function reads.
    """

    def __init__(self, function: Callable[[Tensor], Tensor], *uses: nn.Module) -> None:
        super().__init__()
        self.function = function
        self.uses = nn.ModuleList(uses)

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x)


def blocks(model: nn.Module) -> list[nn.Module]:
    """The repeated parts of `model`, in order.

    These are the items of its own `nn.ModuleList`s, `nn.ModuleDict`s and `nn.Sequential`s. For a model without any,
    they are its direct children that have parameters, and without those either, the model itself. Containers without
    their own forward pass are replaced by their contents.

    Example:
        >>> len(blocks(nn.Sequential(nn.Linear(2, 2), nn.ReLU())))
        2
    """
    if isinstance(model, nn.Sequential):
        return _that_run(model)
    lists = [child for child in model.children() if isinstance(child, nn.Sequential) or not _runs(child)]
    found = [block for items in lists for block in _that_run(items.children())]
    return found or _with_parameters(_that_run(model.children())) or [model]


def units_of(model: nn.Module, *, besides: Collection[str] = ()) -> list[nn.Module]:
    """The blocks of a model whose parameters no other part of it holds.

    FSDP2 would shard a tensor that two blocks share in the first one only, and silently untie the second. So blocks
    with shared parameters are left to the root unit, which keeps them tied, as are those named in `besides`.
    """
    left = {model.get_submodule(name) for name in besides}
    owners: dict[int, set[int]] = {}
    for module in model.modules():
        for parameter in module.parameters(recurse=False):
            owners.setdefault(id(parameter), set()).add(id(module))
    found = dict.fromkeys(blocks(model))  # a block that runs twice is listed twice, but is one unit
    return [
        block for block in found if block is not model and block not in left and _holds_alone(block, owners)
    ]


def _runs(module: nn.Module) -> bool:
    """Whether the module has a forward pass; `nn.ModuleList` and `nn.ModuleDict` have none."""
    return type(module).forward is not nn.Module.forward


def _that_run(modules: Iterable[nn.Module]) -> list[nn.Module]:
    """The modules in order, with each container without a forward pass replaced by its contents."""
    return [
        runs for module in modules for runs in ([module] if _runs(module) else _that_run(module.children()))
    ]


def _with_parameters(modules: Iterable[nn.Module]) -> list[nn.Module]:
    return [module for module in modules if next(module.parameters(), None) is not None]


def _holds_alone(block: nn.Module, owners: dict[int, set[int]]) -> bool:
    inside = {id(module) for module in block.modules()}
    parameters = list(block.parameters())
    return bool(parameters) and all(owners[id(parameter)] <= inside for parameter in parameters)
