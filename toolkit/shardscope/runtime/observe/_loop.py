"""Hooks on the user's own training loop: forward and backward passes, and the optimizer's updates.

The model's own hooks report its forward passes. Torch's global optimizer hooks report the updates of whichever
optimizer steps. A function that replaces ``torch.autograd.backward``, and calls it, reports the backward passes. None
of them changes a tensor or a result. `Loop.remove` removes all of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial, wraps
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils._pytree import tree_leaves

Guard = Callable[[Callable[[], None]], None]


class Listener(Protocol):
    """Receives the events of the loop, in the thread in which they occur."""

    def forward_begins(self, inputs: list[Tensor], *, is_whole: bool) -> None:
        """Handle the start of a forward pass of the model or, unless `is_whole`, of a part called separately."""

    def forward_ends(self) -> None:
        """Handle the end of a forward pass."""

    def backward_begins(self, roots: Any) -> None:
        """Handle the start of a backward pass from these tensors."""

    def backward_ends(self) -> None:
        """Handle the end of a backward pass, after gradients have been exchanged."""

    def update_begins(self, optimizer: Optimizer) -> None:
        """Handle the start of an optimizer step; with a closure, the step includes the closure's passes."""

    def update_ends(self, optimizer: Optimizer) -> None:
        """Handle the end of an optimizer step."""


class Loop:
    """Reports the passes and updates of a training loop to `listener`, from `install` to `remove`.

    Args:
        model: The model. If it is not called itself, as may be the case for a `LightningModule`, the parts that it
            calls are observed.
        listener: Receives the events of the loop.
        guard: Runs a function of the observer such that its errors never reach the training loop.
    """

    def __init__(self, model: nn.Module, listener: Listener, guard: Guard) -> None:
        self._model, self._listener, self._guard = model, listener, guard
        self._depth = 0
        self._is_in_backward = False
        self._undo = ExitStack()

    def install(self) -> None:
        """Register all hooks."""
        for module in (self._model, *_parts(self._model)):
            before = partial(self._before_forward, is_whole=module is self._model)
            after = partial(self._after_forward)
            hook = module.register_forward_pre_hook(before, with_kwargs=True, prepend=True)
            self._undo.callback(hook.remove)
            self._undo.callback(module.register_forward_hook(after, always_call=True).remove)
        self._undo.callback(register_optimizer_step_pre_hook(self._before_update).remove)
        self._undo.callback(register_optimizer_step_post_hook(self._after_update).remove)
        self._watch_backward()

    def remove(self) -> None:
        """Remove all hooks."""
        self._undo.close()

    def _before_forward(self, _: nn.Module, args: Any, kwargs: Any, *, is_whole: bool) -> None:
        self._depth += 1
        if self._depth > 1 or self._is_in_backward:  # in a backward pass, recomputation runs parts again
            return
        inputs = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        self._guard(lambda: self._listener.forward_begins(inputs, is_whole=is_whole))

    def _after_forward(self, *_: Any) -> None:
        self._depth -= 1
        if not (self._depth or self._is_in_backward):
            self._guard(self._listener.forward_ends)

    def _before_update(self, optimizer: Optimizer, *_: Any) -> None:
        self._guard(lambda: self._listener.update_begins(optimizer))

    def _after_update(self, optimizer: Optimizer, *_: Any) -> None:
        self._guard(lambda: self._listener.update_ends(optimizer))

    def _watch_backward(self) -> None:
        original = torch.autograd.backward

        @wraps(original)
        def backward(tensors: Any, *args: Any, **kwargs: Any) -> None:
            if self._is_in_backward:  # a part of the outer pass
                return original(tensors, *args, **kwargs)
            self._guard(lambda: self._listener.backward_begins(tensors))
            self._is_in_backward = True
            try:
                original(tensors, *args, **kwargs)
            finally:
                self._is_in_backward = False
                self._guard(self._listener.backward_ends)

        torch.autograd.backward = backward
        self._undo.callback(setattr, torch.autograd, "backward", original)


def _parts(model: nn.Module) -> Iterator[nn.Module]:
    """Yield the modules that a model may call separately: its children, and those in lists and mappings among them."""
    for child in model.children():
        if isinstance(child, nn.ModuleList | nn.ModuleDict):
            yield from _parts(child)
        elif next(child.parameters(), None) is not None:
            yield child
