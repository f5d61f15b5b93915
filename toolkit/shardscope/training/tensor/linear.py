"""Linear layers of which each rank holds some columns or some rows.

A layer is changed in place: its class is replaced by a subclass with another `forward`, so its parameters keep their
names, and the layer can still be copied.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from shardscope.training.tensor.axis import TensorAxis
from shardscope.training.tensor.functions import Enter, JoinedColumns, Leave, LeaveInParts


class _Columns(nn.Linear):
    """Mixin of a layer whose outputs are divided: the ranks compute different columns of the product."""

    tensor_axis: TensorAxis
    takes_parts: bool
    """Whether each rank has a part of the sequences."""

    def forward(self, x: Tensor) -> Tensor:
        columns = self._columns(x)
        if self.training:
            self.tensor_axis.begin_divided(x.device)
        return columns

    def _columns(self, x: Tensor) -> Tensor:
        dtype = None
        if torch.is_autocast_enabled(x.device.type):  # so that gradients are summed in this dtype too
            dtype = torch.get_autocast_dtype(x.device.type)
        if self.takes_parts:
            x, weight, bias = (
                each if each is None else each.to(dtype) for each in (x, self.weight, self.bias)
            )
            joined: Tensor = JoinedColumns.apply(x, weight, bias, self.tensor_axis)  # type: ignore[no-untyped-call]
            return joined
        entered: Any = Enter.apply(x.to(dtype), self.tensor_axis)  # type: ignore[no-untyped-call]
        columns: Tensor = super().forward(entered)
        return columns


class _Rows(nn.Linear):
    """Mixin of a layer whose inputs are divided: the ranks compute terms of the product, which are summed.

    Each rank has the whole bias, which is added once, after the sum.
    """

    tensor_axis: TensorAxis
    takes_parts: bool
    """Whether each rank gets a part of the sequences."""

    def forward(self, part: Tensor) -> Tensor:
        if self.training and not self.takes_parts:
            self.tensor_axis.end_divided(part.device)
        partial = functional.linear(part, self.weight)
        leave = LeaveInParts if self.takes_parts else Leave
        summed: Tensor = leave.apply(partial, self.tensor_axis)  # type: ignore[no-untyped-call]
        return summed if self.bias is None else summed + self.bias.to(summed.dtype)


_KINDS: dict[str, type[nn.Linear]] = {"columns": _Columns, "rows": _Rows}


def divide_linear(layer: nn.Linear, kind: str, axis: TensorAxis, *, takes_parts: bool) -> None:
    """Make a linear layer compute with this rank's part of its weights, which must be divided already.

    Args:
        layer: The layer.
        kind: ``columns`` or ``rows``.
        axis: The ranks.
        takes_parts: Whether each rank has a part of the sequences before a layer of columns and after one of rows.
    """
    cls = type(layer)
    layer.__class__ = type(f"{kind.title()}Of{cls.__name__}", (_KINDS[kind], cls), {})
    layer.tensor_axis, layer.takes_parts = axis, takes_parts  # type: ignore[assignment] # not parameters
    layer.out_features, layer.in_features = layer.weight.shape
