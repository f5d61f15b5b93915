"""Finds the blocks of a model whose parameters are read outside the block's forward pass.

FSDP2 gathers a block's parameters when the block's forward pass begins, and frees them when it ends. Some models read
parameters outside it, such as the weight of the head in ``F.linear(h, self.head.weight)``, or read the parameters of
one block in another. A forward pass on an example finds these blocks. Their parameters are then assigned to the root
unit, where they stay gathered during the whole forward pass.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from shardscope.errors import SpecError
from shardscope.training.models import units_of
from shardscope.training.twin import twin_of

_GIVES_NUMBERS = {"item", "tolist", "numpy", "__bool__", "__float__", "__int__", "__index__"}
"""Functions that do not return a tensor but read a tensor's elements; other functions without a tensor result read only
metadata such as the shape."""


def blocks_read_outside(model: nn.Module, run: Callable[[nn.Module], Any]) -> dict[str, bool]:
    """Map the name of each block that could be a sharding unit to whether its parameters are read outside it.

    Args:
        model: The model; it stays unchanged, because only a copy of it is run.
        run: Function that calls the model that it receives. Its errors are ignored, because the first training step
            will raise them again.
    """
    units, twin, found = set(units_of(model)), twin_of(model), set[str]()
    names = [name for name, module in model.named_modules() if module in units]
    if twin is not None:
        with suppress(Exception):
            found = read_outside(twin, names, run)
    return {name: name in found for name in names}


@contextmanager
def explaining_reads(strategy: str) -> Iterator[None]:
    """Return a context manager that replaces PyTorch's error for a parameter read outside its block with a clear one.

    It is needed for models that did not read the parameter outside its block in the pass on the example.

    Raises:
        SpecError: The model reads a parameter outside its block, where only a shard is available.
    """
    try:
        yield
    except RuntimeError as error:
        if "mixed torch.Tensor and DTensor" not in str(error):
            raise
        raise SpecError(
            "the model reads a block's parameter outside the block's forward pass, where "
            f"strategy={strategy!r} has only a shard of it; the test pass before training did not show this; "
            "call the block instead, or use strategy='zero-1'"
        ) from error


def read_outside(model: nn.Module, blocks: Sequence[str], run: Callable[[nn.Module], Any]) -> set[str]:
    """Return the names of the blocks with a parameter that is read outside the block's forward pass.

    Args:
        model: The model, which should be a copy, because its blocks keep the hooks that are added here.
        blocks: Names of the blocks in `model`.
        run: Function that calls the model that it receives.
    """
    modules = {name: model.get_submodule(name) for name in blocks}
    watch = _Watch({id(p): name for name, module in modules.items() for p in module.parameters()})
    for name, module in modules.items():
        watch.follow(name, module)
    with torch.no_grad(), watch:
        run(model)
    return watch.found


class _Watch(TorchFunctionMode):
    """Context manager that intercepts all calls of PyTorch functions, to find those that read a parameter.

    Args:
        owners: Name of the block of each parameter, by the parameter's `id`.

    Attributes:
        running: Names of the blocks whose forward pass is running.
        found: Names of the blocks with a parameter that was read outside the block's forward pass.
    """

    def __init__(self, owners: Mapping[int, str]) -> None:
        super().__init__()
        self.owners = owners
        self.running: list[str] = []
        self.found: set[str] = set()

    def follow(self, name: str, module: nn.Module) -> None:
        """Register hooks that record in `running` when the forward pass of a block runs."""
        module.register_forward_pre_hook(lambda *_: self.running.append(name), prepend=True)
        module.register_forward_hook(lambda *_: self.running.remove(name), always_call=True)

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if getattr(func, "__name__", "") in _GIVES_NUMBERS or next(_tensors([result]), None) is not None:
            owners = {self.owners.get(id(tensor)) for tensor in _tensors([args, kwargs])}
            self.found |= {name for name in owners if name is not None and name not in self.running}
        return result


def _tensors(values: Iterable[Any]) -> Iterator[Tensor]:
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, Mapping):
            yield from _tensors(value.values())
        elif isinstance(value, list | tuple):
            yield from _tensors(value)
