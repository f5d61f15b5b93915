"""Linear layers of which each rank holds some columns or some rows: `nn.Linear`, and the `Conv1D` of transformers.

A layer is changed in place: its class is replaced by a subclass with another `forward`, so its parameters keep their
names, and the layer can still be copied.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from shardscope.training.tensor.axis import TensorAxis
from shardscope.training.tensor.functions import Enter, GatherColumns, Leave, with_adjoint
from shardscope.training.tensor.of_transformers import is_conv1d


def is_linear(layer: nn.Module) -> bool:
    """Return whether a layer is linear: its weight has the outputs in one dimension, and the inputs in the other."""
    return isinstance(layer, nn.Linear) or is_conv1d(layer)


def output_dim(layer: nn.Module) -> int:
    """Return the dimension of a linear layer's weight that has the outputs."""
    return int(is_conv1d(layer))


def has_own_code(layer: nn.Module) -> bool:
    """Return whether a linear layer has a forward pass, or a way to hold its weight, that is not that of its kind."""
    is_plain = is_conv1d(layer) or type(layer).forward is nn.Linear.forward
    return not is_plain or "weight" not in layer._parameters  # noqa: SLF001


def autocast_dtype(x: Tensor) -> torch.dtype | None:
    """Return the dtype to which autocast converts the factors of a product; None without autocast."""
    device = x.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None


class _Divided(nn.Module):
    """Mixin of a divided layer."""

    weight: Tensor
    bias: Tensor | None
    tensor_axis: TensorAxis
    divides_sequences: bool
    """Whether each rank has a part of the sequences outside the divided layers (sequence parallelism)."""
    is_gathered: bool
    """Whether a layer around this one has gathered the whole sequences already."""
    is_transposed: bool
    """Whether the weight has its outputs in the last dimension."""

    @property
    def matrix(self) -> Tensor:
        """The weight with the outputs in the first dimension."""
        return self.weight.t() if self.is_transposed else self.weight


class _Columns(_Divided):
    """Mixin of a layer whose outputs are divided: the ranks compute different columns of the product."""

    def forward(self, x: Tensor) -> Tensor:
        columns = self._columns(x)
        if self.training:
            self.tensor_axis.begin_divided(x.device)
        return columns

    def _columns(self, x: Tensor) -> Tensor:
        if self.is_gathered:
            return functional.linear(x, self.matrix, self.bias)
        dtype = autocast_dtype(x)  # so that gradients are summed in this dtype too
        if self.divides_sequences:
            weight, bias = (each if each is None else each.to(dtype) for each in (self.matrix, self.bias))
            x = x.to(dtype)
            columns: Tensor = GatherColumns.apply(x, weight, bias, self.tensor_axis)  # type: ignore[no-untyped-call]
            return columns
        entered: Any = Enter.apply(x.to(dtype), self.tensor_axis)  # type: ignore[no-untyped-call]
        return functional.linear(entered, self.matrix, self.bias)


class _Rows(_Divided):
    """Mixin of a layer whose inputs are divided: the ranks compute terms of the product, which are summed.

    Each rank has the whole bias, which is added once, after the sum.
    """

    def forward(self, part: Tensor) -> Tensor:
        if self.training and not self.divides_sequences:
            self.tensor_axis.end_divided(part.device)
        partial = functional.linear(part, self.matrix)
        axis, summed = self.tensor_axis, partial
        if self.divides_sequences:
            summed = with_adjoint(partial, axis.reduce_scatter, axis.gather)
        else:
            summed = Leave.apply(partial, axis)  # type: ignore[no-untyped-call]
        return summed if self.bias is None else summed + self.bias.to(summed.dtype)


def divided_parameters(model: nn.Module) -> Iterator[nn.Parameter]:
    """Yield the parameters of which this rank has a part."""
    for layer in model.modules():
        if isinstance(layer, _Divided):
            yield layer.get_parameter("weight")
            if isinstance(layer, _Columns) and layer.bias is not None:
                yield layer.get_parameter("bias")


_KINDS: dict[str, type[_Divided]] = {"columns": _Columns, "rows": _Rows}


def divide_linear(
    layer: Any, kind: str, axis: TensorAxis, *, divides_sequences: bool, is_gathered: bool
) -> None:
    """Make a linear layer compute with this rank's part of its weights, which must be divided already.

    Args:
        layer: The layer.
        kind: ``columns`` or ``rows``.
        axis: The ranks.
        divides_sequences: Whether each rank has a part of the sequences before a layer of columns and after one of
            rows.
        is_gathered: Whether a layer around this one gathers the whole sequences.
    """
    cls, is_transposed = type(layer), is_conv1d(layer)
    layer.__class__ = type(f"{kind.title()}Of{cls.__name__}", (_KINDS[kind], cls), {})
    layer.tensor_axis, layer.is_transposed = axis, is_transposed
    layer.divides_sequences, layer.is_gathered = divides_sequences, is_gathered
    if is_transposed:
        layer.nx, layer.nf = layer.weight.shape
    else:
        layer.out_features, layer.in_features = layer.weight.shape
