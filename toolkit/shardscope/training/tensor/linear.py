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
from shardscope.training.tensor.functions import Enter, Leave


class _Columns(nn.Linear):
    """Mixin of a layer whose outputs are divided: the ranks compute different columns of the product."""

    tensor_axis: TensorAxis

    def forward(self, whole: Tensor) -> Tensor:
        if torch.is_autocast_enabled(whole.device.type):  # so that gradients are summed in this dtype too
            whole = whole.to(torch.get_autocast_dtype(whole.device.type))
        entered: Any = Enter.apply(whole, self.tensor_axis)  # type: ignore[no-untyped-call]
        return super().forward(entered)


class _Rows(nn.Linear):
    """Mixin of a layer whose inputs are divided: the ranks compute terms of the product, which are summed.

    Each rank has the whole bias, which is added once, after the sum.
    """

    tensor_axis: TensorAxis

    def forward(self, part: Tensor) -> Tensor:
        partial = functional.linear(part, self.weight)
        summed: Tensor = Leave.apply(partial, self.tensor_axis)  # type: ignore[no-untyped-call]
        return summed if self.bias is None else summed + self.bias.to(summed.dtype)


_KINDS: dict[str, type[nn.Linear]] = {"columns": _Columns, "rows": _Rows}


def divide_linear(layer: nn.Linear, kind: str, axis: TensorAxis) -> None:
    """Make a linear layer compute with this rank's part of its weights, which must be divided already."""
    cls = type(layer)
    layer.__class__ = type(f"{kind.title()}Of{cls.__name__}", (_KINDS[kind], cls), {})
    layer.tensor_axis = axis  # type: ignore[assignment] # not a parameter
    layer.out_features, layer.in_features = layer.weight.shape
