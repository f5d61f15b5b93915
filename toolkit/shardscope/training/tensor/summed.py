"""Layers whose parameters are replicated on all ranks, each of which computes with a part of their inputs.

That part is a rank's tokens, or its heads or columns between divided layers. Each rank then has one term of a
parameter's gradient, and the ranks sum the terms in the backward pass, so that any data strategy gets the whole one.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import nn

from shardscope.training.tensor.axis import TensorAxis
from shardscope.training.tensor.functions import SumGradients


def sum_gradients(layer: Any, names: Sequence[str], axis: TensorAxis) -> None:
    """Make the ranks sum the gradients of a layer's own parameters, unless they do so already.

    Args:
        layer: The layer, which is changed in place: its class is replaced by a subclass.
        names: Names of the parameters, without the layer's.
        axis: The ranks.
    """
    cls = type(layer)
    if names and not issubclass(cls, _SumsGradients):
        layer.__class__ = type(f"SummedOf{cls.__name__}", (_SumsGradients, cls), {})
        layer.tensor_axis, layer.summed = axis, tuple(names)


class _SumsGradients(nn.Module):
    """Mixin of a layer with parameters whose gradients are summed over the ranks."""

    tensor_axis: TensorAxis
    summed: tuple[str, ...]
    """Names of these parameters."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        with self._summing():
            return super().forward(*args, **kwargs)

    @contextmanager
    def _summing(self) -> Iterator[None]:
        own = {name: parameter for name, parameter in self._parameters.items() if name in self.summed}
        entered: Any = SumGradients.apply(self.tensor_axis, *own.values())  # type: ignore[no-untyped-call]
        self._parameters.update(zip(own, entered, strict=True))
        try:
            yield
        finally:
            self._parameters.update(own)
