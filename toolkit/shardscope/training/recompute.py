"""Activation recomputation: save fewer tensors in the forward pass, and compute them again in the backward pass.

A module is changed in place: its class is replaced by a subclass whose `forward` is checkpointed. Parameters keep their
names, so a state dict from one mode can be loaded in another, and the module can still be copied. Gradients are bitwise
identical to those without recomputation.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack
from functools import partial
from types import TracebackType
from typing import Any, Literal, Self

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint, noop_context_fn

from shardscope.errors import unknown_name
from shardscope.training._compat import SavedTensor, function_modes
from shardscope.training.memory import counting
from shardscope.training.models import CheapToRecompute, blocks

Contexts = tuple[AbstractContextManager[Any], AbstractContextManager[Any]]

Results = dict[Any, list[SavedTensor | None]]
"""For each operation, its stored results in the order of the forward pass; a result becomes None when it is used."""

RecomputeMode = Literal["none", "selective", "full"]

_COSTLY = [
    torch.ops.aten.mm.default,
    torch.ops.aten.addmm.default,
    torch.ops.aten.bmm.default,
    torch.ops.aten.convolution.default,
]
"""Operations whose results selective recomputation stores in a model without `CheapToRecompute` modules."""


def apply_recompute(model: nn.Module, mode: RecomputeMode) -> nn.Module:
    """Change `model` in place so that it recomputes activations in its backward pass, and return it.

    The modes are:

    - ``"none"``: all activations are stored.
    - ``"full"``: only the inputs of each block are stored, and the block is recomputed.
    - ``"selective"``: the parts that take much memory but little computation are recomputed (Korthikanti et al., arXiv
      2205.05198, section 5). In a GPT of the catalogue, these are the attention core and the activation function, whose
      outputs are the inputs of the next linear layers: of 16 activations per layer, token and hidden unit, 11 are
      stored. Unlike in the paper, attention scores are not stored in any mode, because attention is fused. In other
      models, the results of matrix products and convolutions are stored, and the rest of each block is recomputed.

    Raises:
        SpecError: There is no such mode.
    """
    if mode == "none":
        return model
    if mode == "full":
        _recompute(blocks(model))
    elif mode == "selective":
        cheap = [module for module in model.modules() if isinstance(module, CheapToRecompute)]
        _recompute(cheap) if cheap else _recompute(blocks(model), keep=_COSTLY)
    else:
        raise unknown_name("recompute", mode, ["none", "selective", "full"])
    return model


def recomputes_blocks(model: nn.Module) -> bool:
    """Return whether a model recomputes whole blocks, and not only parts that are cheap to recompute."""
    recomputed = (module for module in model.modules() if isinstance(module, _Recomputed))
    return any(not isinstance(module, CheapToRecompute) for module in recomputed)


def _recompute(modules: Sequence[nn.Module], *, keep: Sequence[Any] = ()) -> None:
    for module in modules:
        cls = type(module)
        if not issubclass(cls, _Recomputed):
            module.__class__ = _recomputed(cls, keep)


def _recomputed(cls: type[nn.Module], keep: Sequence[Any]) -> type[nn.Module]:
    """Return the subclass of `cls` that is recomputed, the same for all modules of that class."""
    for known in cls.__subclasses__():  # a cache would keep classes that nothing uses
        if known.__bases__ == (_Recomputed, cls) and vars(known)["_keep"] == keep:
            return known
    return type(f"Recomputed{cls.__name__}", (_Recomputed, cls), {"_keep": keep})


class _Recomputed(nn.Module):
    """Mixin that changes `forward` to save only its inputs and the results of the operations in `_keep`."""

    _keep: Sequence[Any]

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        forward = super().forward
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        return checkpoint(forward, *args, use_reentrant=False, context_fn=self._contexts(), **kwargs)

    def _contexts(self) -> Callable[[], Contexts]:
        """Return a function that creates the context managers for `checkpoint`'s forward pass and recomputation.

        If memory is measured in this step, they also count the stored and recomputed tensors.
        """
        plain = partial(_keeping, self._keep) if self._keep else noop_context_fn
        activations, modes = counting(), function_modes()
        if activations is None and not modes:
            return plain

        def counted() -> Contexts:
            first, again = plain()
            again = _Joined(*modes, again)  # `checkpoint` recomputes outside the forward pass's modes
            if activations is None:
                return first, again
            if self._keep:
                first = _Joined(first, activations.keeping(self._keep))
            return first, _Joined(again, activations.recomputing())

        return counted


def _keeping(operations: Sequence[Any]) -> Contexts:
    """Return two context managers: one stores the results of `operations`, the other reuses them in the recomputation.

    They replace PyTorch's context managers for selective checkpointing, which have two drawbacks. First, they require
    the same number of operations in the recomputation; with autocast, which caches converted weights, the number of
    conversions differs, and they fail. Second, they raise an error if the model has modified a stored result in place.
    """
    kept: Results = {operation: [] for operation in operations}
    return _Keep(kept), _Take(kept)


class _Keep(TorchDispatchMode):
    """Dispatch mode that stores the results of the operations that are keys of `kept`, in order."""

    def __init__(self, kept: Results) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.kept = kept

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func in self.kept:
            self.kept[func].append(SavedTensor(result))
        return result


class _Take(TorchDispatchMode):
    """Dispatch mode that returns each stored result once, instead of running the operation.

    A result that has been modified in place, or is needed a second time, is recomputed.
    """

    def __init__(self, kept: Results) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.kept = kept

    def __enter__(self) -> Self:
        self.taken: Counter[Any] = Counter()
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in self.kept:
            kept, index = self.kept[func], self.taken[func]
            self.taken[func] += 1
            if index < len(kept) and (found := kept[index]) is not None:
                kept[index] = None
                if found.is_unchanged:
                    return found.result
        return func(*args, **(kwargs or {}))


class _Joined(AbstractContextManager[None]):
    """Context manager that enters several others; it can be entered repeatedly."""

    def __init__(self, *contexts: AbstractContextManager[Any]) -> None:
        self._contexts = contexts
        self._entered = ExitStack()

    def __enter__(self) -> None:
        for context in self._contexts:
            self._entered.enter_context(context)

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, tb: TracebackType | None
    ) -> bool | None:
        return self._entered.__exit__(kind, value, tb)
