"""Sequence parallelism: between divided layers, each rank of a tensor group processes a part of every sequence.

Layers that treat each token by itself, such as norms, need not be computed by all ranks for all tokens: the first such
layer keeps its rank's part of the input, and the last gathers its output. Gradients of their parameters are those of a
rank's tokens only, so the ranks sum them.

Source:
    Korthikanti et al., arXiv 2205.05198, section 4.2.2.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from shardscope.training.tensor.axis import TensorAxis
from shardscope.training.tensor.functions import with_adjoint
from shardscope.training.tensor.linear import autocast_dtype
from shardscope.training.tensor.summed import sum_gradients


def divide_sequences(
    layers: Sequence[tuple[str, nn.Module]], divided: Collection[str], axis: TensorAxis
) -> None:
    """Make layers, which run one after another, process this rank's part of each sequence.

    Args:
        layers: The layers with their names, in the order in which they run.
        divided: Names of the divided parameters, whose gradients are those of whole sequences.
        axis: The ranks.
    """
    layers[0][1].register_forward_pre_hook(_ShardInput(axis), with_kwargs=True)
    layers[-1][1].register_forward_hook(_GatherOutput(axis))
    for prefix, layer in layers:
        for name, module in layer.named_modules(prefix=prefix):
            whole = [
                own for own, _ in module.named_parameters(recurse=False) if f"{name}.{own}" not in divided
            ]
            sum_gradients(module, whole, axis)


def gather_input(layer: nn.Module, axis: TensorAxis) -> None:
    """Make a layer within the others, such as attention, gather whole sequences once for all its divided layers."""
    layer.register_forward_pre_hook(_GatherInput(axis), with_kwargs=True)


def _first_of(values: Any) -> Tensor:
    """Return a tensor, or the first of a tuple."""
    return values if isinstance(values, Tensor) else _first_of(values[0])


def _with_first(values: Any, first: Tensor) -> Any:
    """Return a tensor, or a tuple that begins with one, with another tensor in its place."""
    return first if isinstance(values, Tensor) else (_with_first(values[0], first), *values[1:])


@dataclass(frozen=True)
class _Input(ABC):
    """Hook that changes the first tensor among a layer's arguments."""

    axis: TensorAxis

    def __call__(self, layer: nn.Module, args: Any, kwargs: dict[str, Any]) -> Any:
        values = args or tuple(kwargs.values())
        values = _with_first(values, self.changed(layer, _first_of(values)))
        return (values, kwargs) if args else ((), dict(zip(kwargs, values, strict=True)))

    @abstractmethod
    def changed(self, layer: nn.Module, x: Tensor) -> Tensor:
        """Return what the layer gets instead."""


class _ShardInput(_Input):
    """Keeps this rank's part of the sequences; the backward pass gathers the gradient."""

    def changed(self, layer: nn.Module, x: Tensor) -> Tensor:
        if layer.training:
            self.axis.begin_divided(x.device)
        return with_adjoint(x, self.axis.shard, self.axis.gather)


class _GatherInput(_Input):
    """Gathers the whole sequences; the backward pass reduce-scatters the gradient."""

    def changed(self, layer: nn.Module, x: Tensor) -> Tensor:  # noqa: ARG002 - see `_ShardInput`
        return with_adjoint(x.to(autocast_dtype(x)), self.axis.gather, self.axis.reduce_scatter)


@dataclass(frozen=True)
class _GatherOutput:
    """Hook that gathers the whole sequences of a layer's output, or of the first of its outputs."""

    axis: TensorAxis

    def __call__(self, layer: nn.Module, args: Any, output: Any) -> Any:  # noqa: ARG002 - torch's signature
        part = _first_of(output)
        if layer.training:
            self.axis.end_divided(part.device)
        return _with_first(output, with_adjoint(part, self.axis.gather, self.axis.shard))
