"""A model as a sequence of layers, which a pipeline can cut.

Three kinds of model can be cut: those of the catalogue, any `nn.Sequential` (nested ones are flattened), and the user's
own modules that define a method

    def pipeline_layers(self) -> list[tuple[str, nn.Module]]: ...

whose layers, called one after another on one tensor each, compute the same as `forward`. Names are only for messages:
the parameters keep the names that they have in the whole model.
"""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn

from shardscope.errors import SpecError

Layers = list[tuple[str, nn.Module]]


def layers_in_order(model: nn.Module) -> Layers:
    """The layers of `model` with their names, in the order in which they run.

    Raises:
        SpecError: The model is not of one of these kinds.

    Example:
        >>> model = nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.ReLU(), nn.Linear(2, 1)))
        >>> [name for name, _ in layers_in_order(model)]
        ['0', '1.0', '1.1']
    """
    own = getattr(model, "pipeline_layers", None)
    layers = list(own()) if callable(own) else list(_flattened(model))
    if not layers:
        raise SpecError(
            f"model of type {type(model).__name__} cannot be cut into stages; give an nn.Sequential, or a module with "
            "a method pipeline_layers() that returns its layers as (name, module) in the order they run"
        )
    return layers


def _flattened(module: nn.Module, prefix: str = "") -> Iterator[tuple[str, nn.Module]]:
    """The layers of nested Sequentials; one with its own `forward` (recomputed as a whole) is one layer."""
    if not isinstance(module, nn.Sequential) or type(module).forward is not nn.Sequential.forward:
        if prefix:
            yield prefix[:-1], module
        return
    for index, child in enumerate(module):  # not named_children, which leaves out repeated layers
        yield from _flattened(child, f"{prefix}{index}.")
