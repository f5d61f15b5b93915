"""Parameters that a model also keeps outside its modules, in a list or a closure.

FSDP2 replaces a module's parameters with shards. A reference elsewhere would keep the initial values, and those would
never be trained.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

from torch import Tensor, nn

from shardscope.errors import SpecError


@contextmanager
def refusing_strays(model: nn.Module, strategy: str) -> Iterator[None]:
    """Context in which parameters are replaced; afterwards, a gradient for a replaced one is refused.

    The refusal is a `SpecError` raised from the backward pass.
    """
    replaced = {name: weakref.ref(p) for name, p in model.named_parameters() if p.requires_grad}
    yield
    gc.collect()  # frees unreferenced parameters
    kept = {id(parameter) for parameter in model.parameters()}
    for name, reference in replaced.items():
        parameter = reference()
        if parameter is not None and id(parameter) not in kept:
            parameter.register_hook(partial(_refuse, name, strategy))


def _refuse(name: str, strategy: str, gradient: Tensor) -> None:  # noqa: ARG001 - hooks are given it
    raise SpecError(
        f"the model uses its parameter {name!r} through a reference of its own, in a list or a closure, and "
        f"strategy={strategy!r} puts shards in the place of parameters, which such a reference does not see; read it "
        "from its module in every forward pass, or use strategy='zero-1'"
    )
