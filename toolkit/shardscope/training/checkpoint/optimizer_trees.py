"""Takes the entries of an optimizer apart into tensors and values for a checkpoint, and puts them together again.

    SECTION.KEY        a tensor
    entries.SECTION    a tree: where the section's tensors belong, and all its other values

A node of a tree is a list of its kind and its content; a section has no tree if all its entries are tensors that need
no description, like those of PyTorch's own optimizers.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from shardscope.errors import CheckpointError
from shardscope.training.checkpoint.pieces import HeldPiece
from shardscope.training.checkpoint.values import encode
from shardscope.training.optim.state import STEP

ENTRIES = "entries."
"""Prefix of the keys of trees."""


@dataclass
class Packing:
    """The flat dictionary to which sections are added.

    Attributes:
        within: Prefix of all keys.
        flat: Tensors and trees by key.
    """

    within: str = ""
    flat: dict[str, Any] = field(default_factory=dict)

    def add(
        self, section: str, entries: Mapping[Any, Any], whole: Collection[Any], parameter: Tensor
    ) -> None:
        """Add the entries of a section.

        Args:
            section: Name of the section.
            entries: Entries of the section.
            whole: Keys of the entries that are tensors with the shape of the section's parameter.
            parameter: A parameter on the device of the optimizer.

        Raises:
            CheckpointError: An entry cannot be saved without a pickle.
        """
        if all(_is_plain(section, key, value, key in whole, parameter) for key, value in entries.items()):
            self.flat |= {f"{self.within}{section}.{key}": value.detach() for key, value in entries.items()}
            return
        packed = [
            [
                _checked(section, key, key),
                self._node(section, (key,), value, parameter, is_whole=key in whole),
            ]
            for key, value in entries.items()
        ]
        self.flat[f"{self.within}{ENTRIES}{section}"] = ["dict", packed]

    def _node(
        self, section: str, path: tuple[Any, ...], value: Any, parameter: Tensor, *, is_whole: bool = False
    ) -> list[Any]:
        if isinstance(value, Tensor):
            at = f"{self.within}{section}.{'.'.join(map(str, path))}"
            while at in self.flat:
                at += "'"
            HeldPiece.all_of(entry_text(section, path[0]), value)
            self.flat[at] = value.detach()
            is_elsewhere = value.device.type == "cpu" and parameter.device.type != "cpu"
            return ["tensor", at.removeprefix(self.within), is_whole, is_elsewhere, _strides(value)]
        if type(value) is torch.Size:
            return ["size", list(value)]
        if type(value) in (list, tuple, deque):
            parts = [self._node(section, (*path, n), part, parameter) for n, part in enumerate(value)]
            return [type(value).__name__, parts, *([value.maxlen] if isinstance(value, deque) else [])]
        if type(value) is dict:
            rows = [
                [_checked(section, path[0], key), self._node(section, (*path, key), part, parameter)]
                for key, part in value.items()
            ]
            return ["dict", rows]
        return ["value", _checked(section, path[0], value)]


def put_together(node: list[Any], tensor: Callable[..., Tensor]) -> Any:
    """Return the value of a node; `tensor` is called with the content of a tensor's node and returns the tensor."""
    kind, content, *flags = node
    match kind:
        case "tensor":
            return tensor(content, *flags)
        case "dict":
            return {key: put_together(part, tensor) for key, part in content}
        case "value":
            return content
        case "size":
            return torch.Size(content)
    parts = [put_together(part, tensor) for part in content]
    return deque(parts, *flags) if kind == "deque" else tuple(parts) if kind == "tuple" else parts


def tensors_of(node: list[Any]) -> Iterator[tuple[str, bool]]:
    """Yield the key of each tensor in a tree, and whether it has the shape of the parameter."""
    kind, content, *flags = node
    if kind == "tensor":
        yield content, flags[0]
    elif kind == "dict":
        for _, part in content:
            yield from tensors_of(part)
    elif kind in ("list", "tuple", "deque"):
        for part in content:
            yield from tensors_of(part)


def entry_text(section: str, key: Any) -> str:
    """Return the description of an entry for messages, such as ``entry 't' of parameter 'w'``."""
    kind, _, name = section.rpartition(":")[2].partition(".")
    where = {
        "state": f"entry {key!r} of parameter {name!r}", "group": f"entry {key!r} of its param_groups",
        "attributes": f"attribute {key!r}",
    }  # fmt: skip
    return f"the optimizer's {where.get(kind, f'entry {key!r}')}"


def _strides(tensor: Tensor) -> list[int] | None:
    """Return the strides of a dense tensor that is not row-major, else None; bits of matrix products depend on them."""
    if tensor.is_contiguous() or torch.empty_like(tensor).stride() != tensor.stride():
        return None
    return list(tensor.stride())


def _checked(section: str, key: Any, value: Any) -> Any:
    if isinstance(value, tuple | list | deque | dict | str | bytes | int | float) and type(value) not in (
        tuple, list, deque, dict, str, bytes, int, float, bool,
    ) and type(value).__module__ != "numpy":  # fmt: skip
        raise CheckpointError(
            f"{entry_text(section, key)} is a {type(value).__name__}, which would come back as a "
            f"{type(value).__mro__[1].__name__}; keep tensors, numbers, strings, lists, tuples or dictionaries instead"
        )
    encode(entry_text(section, key), value)
    return value


def _is_plain(section: str, key: Any, value: Any, is_whole: bool, parameter: Tensor) -> bool:
    """Return whether an entry's key, shape and device describe it completely, so that no tree is needed."""
    kind = section.partition(".")[0]
    if kind != "state" or type(key) is not str or not key or "." in key or not isinstance(value, Tensor):
        return False
    if is_whole:
        is_like = value.shape != parameter.shape or value.stride() == torch.empty_like(parameter).stride()
        return key != STEP and value.device == parameter.device and is_like
    return key == STEP and value.dim() == 0 and not value.is_sparse and value.dtype == torch.float32
