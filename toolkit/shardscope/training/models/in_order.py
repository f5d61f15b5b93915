"""Lists the layers of a model in the order in which they run, so that a pipeline can split the model into stages.

Three kinds of model can be split: models of the catalogue, any `nn.Sequential` (nested ones are flattened), and the
user's own modules that define a method

    def pipeline_layers(self) -> list[tuple[str, nn.Module]]: ...

The layers that it returns, called one after another with one tensor as input and output, must compute the same result
as `forward`. The names are used only in messages; the parameters keep the names that they have in the whole model.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import Any

from torch import Tensor, nn

from shardscope.errors import SpecError
from shardscope.training.data.batches import call

Layers = list[tuple[str, nn.Module]]


def layers_in_order(model: nn.Module, *, whole: Collection[str] = ()) -> Layers:
    """Return the layers of `model` with their names, in the order in which they run.

    Args:
        model: The model.
        whole: Names of nested `nn.Sequential`s that are one layer each.

    Raises:
        SpecError: The model is neither an `nn.Sequential` nor a module with a method `pipeline_layers`.

    Example:
        >>> model = nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.ReLU(), nn.Linear(2, 1)))
        >>> [name for name, _ in layers_in_order(model)]
        ['0', '1.0', '1.1']
    """
    own = getattr(model, "pipeline_layers", None)
    layers = list(own()) if callable(own) else list(_flattened(model, whole))
    if not layers:
        raise SpecError(
            f"model of type {type(model).__name__} cannot be split into stages; give an nn.Sequential, or a module "
            "with a method pipeline_layers() that returns its layers as a list of (name, module), in the order in "
            "which they run"
        )
    return layers


def can_be_sent(output: Any) -> bool:
    """Return whether a pipeline can send a layer's output to the next stage: whether it is a floating-point tensor."""
    return isinstance(output, Tensor) and output.is_floating_point()


def _flattened(
    module: nn.Module, whole: Collection[str], prefix: str = ""
) -> Iterator[tuple[str, nn.Module]]:
    """Yield the layers of nested `nn.Sequential`s with their names.

    A subclass of `nn.Sequential` with its own `forward`, such as one that is recomputed as a whole, is one layer.
    """
    cls: Any = type(module)
    cls = getattr(cls, "of_whole_sequences", cls)  # its own class, if it takes parts of sequences
    if (
        not isinstance(module, nn.Sequential)
        or cls.forward is not nn.Sequential.forward
        or prefix[:-1] in whole
    ):
        if prefix:
            yield prefix[:-1], module
        return
    for index, child in enumerate(module):  # named_children() would list a repeated layer only once
        yield from _flattened(child, whole, f"{prefix}{index}.")


class InOrder(nn.Module):
    """A model whose layers are called in order, as the stages of a pipeline call them, and not by its `forward`.

    Parameters have the names that they have in the model.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, *inputs: Any, **named_inputs: Any) -> Any:
        """Return the output of the last layer; the first takes the model's inputs."""
        (_, first), *others = layers_in_order(self.model)
        x = first(*inputs, **named_inputs)
        for _, layer in others:
            x = call(layer, x)
        return x

    def named_parameters(self, *args: Any, **options: Any) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield the model's own named parameters."""
        return self.model.named_parameters(*args, **options)
