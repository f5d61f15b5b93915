"""Compares layers by what decides which operations they run: if two are equal, tracing one of them is enough."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten

_COMPARED_APART = {"_parameters", "_buffers", "_modules"}


class LayerCall:
    """What a layer is, just before it is called with given arguments.

    Two calls are equal if the classes and the attributes of all modules in the layers are equal, as are the sizes and
    types of all parameters, buffers and arguments. What cannot be compared, such as two functions or two tensors in
    attributes that are not the same object, counts as different; so do modules and parameters with hooks.

    Args:
        layer: The layer.
        x: Its arguments.
    """

    def __init__(self, layer: nn.Module, x: Any) -> None:
        leaves, tree = tree_flatten(x)
        self._parts: list[Any] = [tree]
        for name, module in layer.named_modules():
            attributes = {key: each for key, each in vars(module).items() if key not in _COMPARED_APART}
            self._parts += [name, type(module), *attributes, *attributes.values()]
        for name, tensor in (*layer.named_parameters(), *layer.named_buffers()):
            self._parts += [name, *_of_tensor(tensor)]
        for leaf in leaves:
            self._parts += _of_tensor(leaf) if isinstance(leaf, Tensor) else [leaf]

    def equals(self, other: LayerCall) -> bool:
        """Return whether both run the same operations on tensors of equal sizes, as far as can be known."""
        mine, theirs = self._parts, other._parts
        return len(mine) == len(theirs) and all(map(_equal, mine, theirs))


def _of_tensor(tensor: Tensor) -> Iterable[Any]:
    hooks = (getattr(tensor, name, None) for name in ("_backward_hooks", "_post_accumulate_grad_hooks"))
    strides = tensor.stride() if tensor.layout is torch.strided else tensor.layout
    return type(tensor), tensor.shape, strides, tensor.dtype, tensor.device, tensor.requires_grad, *hooks


def _equal(one: Any, other: Any) -> bool:
    if one is other:
        return True
    try:
        return type(one) is type(other) and (one == other) is True
    except Exception:  # noqa: BLE001 - of an attribute's own class, which thus cannot be compared
        return False
