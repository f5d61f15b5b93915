"""Parts of a model: blocks, modules that are cheap to recompute, sharding units, and layers for pipeline stages."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable

from torch import Tensor, nn


class CheapToRecompute(nn.Module):
    """Base class for modules whose saved tensors take much memory, but little arithmetic to recompute.

    Selective recomputation keeps only the inputs of such a module. If its last layer is linear, the matrix product of
    that layer is not computed twice: recomputation stops when the input of the layer has been restored.
    """


class ForwardPart(nn.Module):
    """Module that runs a part of a model's forward pass, so that the model can be split into pipeline stages.

    Args:
        function: Function from the part's input to its output; usually a method of the model.
        uses: The submodules whose parameters the function uses.
    """

    def __init__(self, function: Callable[[Tensor], Tensor], *uses: nn.Module) -> None:
        super().__init__()
        self.function = function
        self.uses = nn.ModuleList(uses)

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x)


class ImageClassifier(nn.Module):
    """Network from images `(N, C, H, W)` to class logits `(N, classes)`: blocks, then a head on their mean features."""

    blocks: nn.ModuleList
    head: nn.Linear

    def forward(self, images: Tensor) -> Tensor:
        """Return the class logits `(N, classes)` for images `(N, C, H, W)`."""
        x = self.embed(images)
        for block in self.blocks:
            x = block(x)
        return self.score(x)

    def embed(self, images: Tensor) -> Tensor:
        """Return the input of the first block; by default the images themselves."""
        return images

    def score(self, x: Tensor) -> Tensor:
        """Return the class logits `(N, classes)` for the features `(N, C, H, W)` of the last block."""
        scores: Tensor = self.head(x.mean(dim=(2, 3)))
        return scores

    def pipeline_layers(self) -> list[tuple[str, nn.Module]]:
        """Return the blocks and the head as named layers, in order, for a pipeline."""
        blocks = [(f"blocks.{i}", block) for i, block in enumerate(self.blocks)]
        return [*blocks, ("head", ForwardPart(self.score, self.head))]


def blocks(model: nn.Module) -> list[nn.Module]:
    """Return the blocks of `model` (usually its repeated layers), in order.

    These are the items of each `nn.ModuleList`, `nn.ModuleDict` and `nn.Sequential` that is a direct child of the
    model, or of the model itself if it is an `nn.Sequential`. If there are no such items, the blocks are the model's
    direct children that have parameters; if no child has any, the model itself is the only block. An item that is a
    container without a forward pass is replaced by its contents.

    Example:
        >>> len(blocks(nn.Sequential(nn.Linear(2, 2), nn.ReLU())))
        2
    """
    if isinstance(model, nn.Sequential):
        return _with_forward(model)
    lists = [
        child for child in model.children() if isinstance(child, nn.Sequential) or not _has_forward(child)
    ]
    found = [block for items in lists for block in _with_forward(items.children())]
    return found or _with_parameters(_with_forward(model.children())) or [model]


def units_of(model: nn.Module, *, besides: Collection[str] = ()) -> list[nn.Module]:
    """Return the blocks of a model that can be sharding units: those that share no parameter with other modules.

    If two blocks share a tensor, FSDP2 would shard it in the first block only, and silently untie the second. So blocks
    with shared parameters belong to the root unit, where the parameters remain tied.

    Args:
        model: The model.
        besides: Names of submodules that also belong to the root unit.
    """
    left = {model.get_submodule(name) for name in besides}
    owners: dict[int, set[int]] = {}
    for module in model.modules():
        for parameter in module.parameters(recurse=False):
            owners.setdefault(id(parameter), set()).add(id(module))
    found = dict.fromkeys(blocks(model))  # a block that runs twice is listed twice, but is one unit
    return [
        block
        for block in found
        if block is not model and block not in left and _shares_no_parameter(block, owners)
    ]


def _has_forward(module: nn.Module) -> bool:
    """Return whether the module defines a forward pass; `nn.ModuleList` and `nn.ModuleDict` do not."""
    return type(module).forward is not nn.Module.forward


def _with_forward(modules: Iterable[nn.Module]) -> list[nn.Module]:
    """Return `modules` in order, with each container that has no forward pass replaced by its contents."""
    return [
        runs
        for module in modules
        for runs in ([module] if _has_forward(module) else _with_forward(module.children()))
    ]


def _with_parameters(modules: Iterable[nn.Module]) -> list[nn.Module]:
    return [module for module in modules if next(module.parameters(), None) is not None]


def _shares_no_parameter(block: nn.Module, owners: dict[int, set[int]]) -> bool:
    inside = {id(module) for module in block.modules()}
    parameters = list(block.parameters())
    return bool(parameters) and all(owners[id(parameter)] <= inside for parameter in parameters)
