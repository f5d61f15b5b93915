"""Find the blocks of a model whose parameters are read while the block does not run.

FSDP2 gathers a block's parameters when its forward pass begins and frees them when it ends. Some models read them
elsewhere, such as a head's weight in ``F.linear(h, self.head.weight)``, or one block's in another. A pass over an
example finds these blocks. Their parameters then go to the root unit, where they stay gathered all the time.
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
"""Functions that read a tensor's elements but return no tensor; all other such functions read its shape or type."""


def blocks_read_outside(model: nn.Module, run: Callable[[nn.Module], Any]) -> dict[str, bool]:
    """Map each block that could be a unit, by name, to whether one of its parameters is read outside it.

    Args:
        model: Stays unchanged; only a twin of it runs.
        run: Calls the model it is given. Its errors are ignored: the first step reports them better.
    """
    units, twin, found = set(units_of(model)), twin_of(model), set[str]()
    names = [name for name, module in model.named_modules() if module in units]
    if twin is not None:
        with suppress(Exception):
            found = read_outside(twin, names, run)
    return {name: name in found for name in names}


@contextmanager
def explaining_reads(strategy: str) -> Iterator[None]:
    """Context in which a read that the example did not show raises a clear error.

    Raises:
        SpecError: The model reads a shard where it expects a whole parameter.
    """
    try:
        yield
    except RuntimeError as error:
        if "mixed torch.Tensor and DTensor" not in str(error):
            raise
        raise SpecError(
            "the model reads a parameter of a block outside the block's forward pass, where "
            f"strategy={strategy!r} has only a shard of it, and did not do so on its first rows; "
            "call the block, or use strategy='zero-1'"
        ) from error


def read_outside(model: nn.Module, blocks: Sequence[str], run: Callable[[nn.Module], Any]) -> set[str]:
    """Names of the blocks with a parameter that `run` reads outside the block's forward pass.

    Args:
        model: Left with hooks on its blocks; meant to be a copy.
        blocks: Names of modules in it.
        run: Calls the model.
    """
    modules = {name: model.get_submodule(name) for name in blocks}
    watch = _Watch({id(p): name for name, module in modules.items() for p in module.parameters()})
    for name, module in modules.items():
        watch.follow(name, module)
    with torch.no_grad(), watch:
        run(model)
    return watch.found


class _Watch(TorchFunctionMode):
    """Intercepts every torch function that is called in its context, with its arguments."""

    def __init__(self, owners: Mapping[int, str]) -> None:
        super().__init__()
        self.owners = owners
        self.running: list[str] = []
        self.found: set[str] = set()

    def follow(self, name: str, module: nn.Module) -> None:
        """Record when this block runs."""
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
