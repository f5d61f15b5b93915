"""References to parameters that FSDP2 replaces with shards: those of other modules, and those outside of modules."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial

from torch import Tensor, nn

from shardscope.errors import SpecError


@contextmanager
def following_tied(model: nn.Module, roots: Sequence[nn.Module]) -> Iterator[None]:
    """Return a context manager after which parameters that modules of `roots` share with others are still the same.

    A parameter has the name that it has in the first module, which may be in another rank's part of the model.
    """
    inside = {module for root in roots for module in root.modules()}
    homes = {p: (module, name) for module in inside for name, p in module.named_parameters(recurse=False)}
    tied = [
        (module, name, *homes[parameter])
        for module in model.modules()
        if module not in inside
        for name, parameter in module.named_parameters(recurse=False)
        if parameter in homes
    ]
    yield
    for module, name, home, own_name in tied:
        setattr(module, name, getattr(home, own_name))


@contextmanager
def refusing_strays(model: nn.Module, strategy: str) -> Iterator[None]:
    """Return a context manager within which FSDP2 replaces the parameters of `model` with shards.

    A reference outside the model's modules, such as in a list or a closure, would still lead to the original parameter,
    which keeps its initial values and is never trained.

    On exit, each original parameter that is still referenced gets a hook, which raises a `SpecError` when a backward
    pass computes a gradient for it.
    """
    replaced = {name: weakref.ref(p) for name, p in model.named_parameters() if p.requires_grad}
    yield
    gc.collect()  # frees unreferenced parameters
    kept = {id(parameter) for parameter in model.parameters()}
    for name, reference in replaced.items():
        parameter = reference()
        if parameter is not None and id(parameter) not in kept:
            parameter.register_hook(partial(_refuse, name, strategy))


def _refuse(name: str, strategy: str, gradient: Tensor) -> None:  # noqa: ARG001 - a hook receives the gradient
    raise SpecError(
        f"the model uses its parameter {name!r} through a reference outside its module, such as in a list or a "
        f"closure, but strategy={strategy!r} has replaced the parameter with a shard; read the parameter from its "
        "module in every forward pass, or use strategy='zero-1'"
    )
