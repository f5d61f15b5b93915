"""Materialise the parameters of lazy modules (such as `nn.LazyLinear`) before a strategy wraps or shards the model.

Shapes come from a forward pass on one micro-batch, in evaluation mode so that running statistics keep their initial
values. Initial values are drawn after those of the model's other parameters, from the same random generator.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from shardscope.errors import SpecError
from shardscope.training.data import call, map_tensors


def is_unfinished(model: nn.Module) -> bool:
    """Whether any parameter or buffer is still lazy and has no shape yet."""
    return _waiting(model) is not None


def materialise(model: nn.Module, inputs: Any) -> None:
    """Materialise all parameters and buffers of `model` in place, with a forward pass on `inputs`.

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
            "give its module all sizes, or make sure that the forward pass calls it in evaluation mode too"
        )


def _in_format_of(model: nn.Module, inputs: Any) -> Any:
    """Return the inputs with all floating-point tensors cast to the dtype of the weights, as in every step."""
    formats = (p.dtype for p in model.parameters() if p.dtype.is_floating_point)
    dtype = next(formats, torch.get_default_dtype())

    def placed(tensor: Tensor) -> Tensor:
        return tensor.to(dtype) if tensor.is_floating_point() else tensor

    return map_tensors(placed, inputs)


def _waiting(model: nn.Module) -> str | None:
    tensors = (*model.named_parameters(), *model.named_buffers())
    return next((name for name, tensor in tensors if is_lazy(tensor)), None)
