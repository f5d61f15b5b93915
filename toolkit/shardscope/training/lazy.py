"""Lazy modules (such as `nn.LazyLinear`): materialises their parameters before a strategy wraps or shards the model.

They take their shapes from a forward pass on one micro-batch, in evaluation mode so that running statistics keep their
initial values. Their values are drawn from the random numbers that follow those of the model's other parameters.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from shardscope.errors import SpecError
from shardscope.training.data import call, map_tensors


def is_unfinished(model: nn.Module) -> bool:
    """Whether any parameter or buffer has no shape yet."""
    return _waiting(model) is not None


def materialise(model: nn.Module, inputs: Any) -> None:
    """Materialise all parameters and buffers of `model`, in place, by a forward pass on `inputs`.

    Raises:
        SpecError: The forward pass does not reach some of them.
    """
    was_training = model.training
    model.eval()
    with torch.no_grad():
        call(model, _in_format_of(model, inputs))
    model.train(was_training)
    name = _waiting(model)
    if name is not None:
        raise SpecError(
            f"{name!r} is lazy, and a forward pass in evaluation mode did not make it; "
            "give its module all sizes, or call it in evaluation mode too"
        )


def _in_format_of(model: nn.Module, inputs: Any) -> Any:
    """The inputs with all floats in the format of the weights, as in every step."""
    formats = (p.dtype for p in model.parameters() if p.dtype.is_floating_point)
    dtype = next(formats, torch.get_default_dtype())

    def placed(tensor: Tensor) -> Tensor:
        return tensor.to(dtype) if tensor.is_floating_point() else tensor

    return map_tensors(placed, inputs)


def _waiting(model: nn.Module) -> str | None:
    tensors = (*model.named_parameters(), *model.named_buffers())
    return next((name for name, tensor in tensors if is_lazy(tensor)), None)
