"""Initialises the parameters of lazy modules (such as `nn.LazyLinear`) before a strategy wraps or shards the model.

A forward pass on one micro-batch determines the shapes. It runs in evaluation mode, so that running statistics keep
their initial values. The values of lazy parameters are drawn after those of the model's other parameters, from the same
random generator.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from shardscope.errors import SpecError
from shardscope.training.data import call, map_tensors


def is_unfinished(model: nn.Module) -> bool:
    """Return whether any parameter or buffer is lazy and not yet initialised."""
    return _first_lazy(model) is not None


def materialise(model: nn.Module, inputs: Any) -> None:
    """Initialise all lazy parameters and buffers of `model`, by a forward pass on `inputs`.

    Raises:
        SpecError: A lazy parameter or buffer is not used in the forward pass.
    """
    was_training = model.training
    model.eval()
    with torch.no_grad():
        call(model, _in_format_of(model, inputs))
    model.train(was_training)
    name = _first_lazy(model)
    if name is not None:
        raise SpecError(
            f"{name!r} is lazy, but a forward pass in evaluation mode did not initialise it; give all sizes to its "
            "module's constructor, or make sure that the forward pass calls the module in evaluation mode too"
        )


def _in_format_of(model: nn.Module, inputs: Any) -> Any:
    """Return `inputs` with floating-point tensors cast to the dtype of the model's weights, as in a training step."""
    formats = (p.dtype for p in model.parameters() if p.dtype.is_floating_point)
    dtype = next(formats, torch.get_default_dtype())

    def placed(tensor: Tensor) -> Tensor:
        return tensor.to(dtype) if tensor.is_floating_point() else tensor

    return map_tensors(placed, inputs)


def _first_lazy(model: nn.Module) -> str | None:
    tensors = (*model.named_parameters(), *model.named_buffers())
    return next((name for name, tensor in tensors if is_lazy(tensor)), None)
