"""Hooks on the user's own training loop: forward and backward passes, and the optimizer's updates.

The model's own hooks report its forward passes. Torch's global optimizer hooks report the updates of whichever
optimizer steps. A wrapper around ``torch.autograd.backward`` reports the backward passes, and wrappers around the
methods of a `GradScaler` report losses before scaling and skipped updates. None of these hooks changes a tensor or a
result. `Loop.remove` removes all hooks.

Code that `torch.compile` traces cannot report anything, so the hooks do nothing while it traces them. A compiled model
is observed from outside: a wrapper reports each call of the function that ``Module.compile`` compiled, or of the
`OptimizedModule` that ``torch.compile`` returned.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, nullcontext
from functools import partial, wraps
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils._pytree import tree_leaves

from shardscope.runtime.observe._grad_scaler import ScalerWatch

Guard = Callable[[Callable[[], None]], None]
_KEY = -1
"""Key of the hooks on a module. If torch chose a new key for each block, Dynamo would recompile each time."""


class Listener(Protocol):
    """Receives the events of the loop, in the thread in which they occur."""

    def forward_begins(self, inputs: list[Tensor], *, is_whole: bool) -> None:
        """Handle the start of a forward pass: of the whole model if `is_whole`, else of a part called separately."""

    def forward_ends(self, output: Any) -> None:
        """Handle the end of a forward pass with its output, which is None if the pass raised an error."""

    def backward_begins(self, roots: Any) -> None:
        """Handle the start of a backward pass from these tensors, or from a scaled copy of them."""

    def backward_ends(self) -> None:
        """Handle the end of a backward pass, after gradients have been exchanged."""

    def update_begins(self, optimizer: Optimizer) -> None:
        """Handle the start of an optimizer step; if it has a closure, the passes in the closure follow."""

    def update_ends(self, optimizer: Optimizer, *, skipped: bool) -> None:
        """Handle the end of an optimizer step, or that a `GradScaler` has skipped it."""

    def updated_in_backward(self, optimizers: list[Optimizer]) -> None:
        """Handle the end of a backward pass within which these optimizers have stepped."""


class Loop:
    """Reports the passes and updates of a training loop to `listener`, from `install` to `remove`.

    Args:
        model: The model. Its parts are observed too, because a `LightningModule` may call them without being called
            itself.
        listener: Receives the events of the loop.
        guard: Runs a function of the observer such that its errors never reach the training loop.
    """

    def __init__(self, model: nn.Module, listener: Listener, guard: Guard) -> None:
        self._model, self._listener, self._guard = model, listener, guard
        self._depth = 0
        self._is_in_backward = False
        self._updated: list[Optimizer] = []
        """Optimizers that have stepped within the current backward pass, from hooks on their parameters."""
        self._undo = ExitStack()
        self._scalers = ScalerWatch(self._skipped_update)
        self._hooks: dict[nn.Module, tuple[_Hook, _Hook]] = {}

    def install(self) -> None:
        """Register all hooks."""
        for module in (self._model, *_parts(self._model)):
            self._watch_forward(module)
        self._watch_compiled()
        self._undo.callback(register_optimizer_step_pre_hook(self._before_update).remove)
        self._undo.callback(register_optimizer_step_post_hook(self._after_update).remove)
        self._watch_backward()
        self._scalers.install(self._undo)

    def remove(self) -> None:
        """Remove all hooks."""
        self._undo.close()
        self._hooks.clear()

    def _watch_forward(self, module: nn.Module) -> None:
        before = _Hook(partial(self._before_forward, is_whole=module is self._model))
        after = _Hook(self._after_forward)
        compiled = module._compiled_call_impl  # noqa: SLF001 - set by Module.compile; copies leave it out
        if compiled is not None:
            module._compiled_call_impl = _between(before, compiled, after, module)  # noqa: SLF001
            self._undo.callback(setattr, module, "_compiled_call_impl", compiled)
            return
        self._hooks[module] = before, after
        own = {
            "_forward_pre_hooks": before, "_forward_pre_hooks_with_kwargs": True,
            "_forward_hooks": after, "_forward_hooks_always_called": True,
        }  # fmt: skip
        for name, value in own.items():
            vars(module)[name][_KEY] = value
            self._undo.callback(vars(module)[name].pop, _KEY, None)
        vars(module)["_forward_pre_hooks"].move_to_end(_KEY, last=False)

    def _watch_compiled(self) -> None:
        from torch._dynamo import OptimizedModule  # torch's optimizers import it in any case

        original = OptimizedModule.__call__

        @wraps(original)
        def call(module: OptimizedModule, *args: Any, **kwargs: Any) -> Any:
            forward: Callable[..., Any] = partial(original, module)
            hooks = self._hooks.get(module._orig_mod)  # noqa: SLF001
            if hooks is not None:
                forward = _between(hooks[0], forward, hooks[1], module)
            return forward(*args, **kwargs)

        OptimizedModule.__call__ = call  # type: ignore[method-assign, assignment]
        self._undo.callback(setattr, OptimizedModule, "__call__", original)

    def _before_forward(self, _: nn.Module, args: Any, kwargs: Any, *, is_whole: bool) -> None:
        self._depth += 1
        if self._depth > 1 or self._is_in_backward:  # in a backward pass, recomputation runs parts again
            return
        inputs = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        self._guard(lambda: self._listener.forward_begins(inputs, is_whole=is_whole))

    def _after_forward(self, _: nn.Module, _args: Any, output: Any) -> None:
        self._depth -= 1
        if not (self._depth or self._is_in_backward):
            self._guard(lambda: self._listener.forward_ends(output))

    def _before_update(self, optimizer: Optimizer, *_: Any) -> None:
        if self._is_in_backward:
            return
        self._guard(lambda: self._listener.update_begins(optimizer))

    def _after_update(self, optimizer: Optimizer, *_: Any) -> None:
        self._scalers.count_update()
        if self._is_in_backward:  # its step ends with the pass: what torch runs meanwhile must not change
            self._updated.append(optimizer)
            return
        self._guard(lambda: self._listener.update_ends(optimizer, skipped=False))

    def _skipped_update(self, optimizer: Optimizer) -> None:
        self._before_update(optimizer)
        self._guard(lambda: self._listener.update_ends(optimizer, skipped=True))

    def _watch_backward(self) -> None:
        original = torch.autograd.backward

        @wraps(original)
        def backward(tensors: Any, *args: Any, **kwargs: Any) -> None:
            if self._is_in_backward:  # a part of the outer pass
                return original(tensors, *args, **kwargs)
            if not isinstance(tensors, Tensor | GradientEdge):
                tensors = list(tensors)  # a generator can be read only once
            self._guard(lambda: self._listener.backward_begins(self._scalers.unscaled(tensors)))
            self._is_in_backward = True
            try:
                original(tensors, *args, **kwargs)
            finally:
                self._is_in_backward = False
                updated, self._updated = self._updated, []
                self._guard(self._listener.backward_ends)
                if updated:
                    self._guard(lambda: self._listener.updated_in_backward(updated))

        torch.autograd.backward = backward
        self._undo.callback(setattr, torch.autograd, "backward", original)


class _Hook:
    """A hook on a module. Copies of it, made by `copy` or `pickle`, do nothing: a copy of a model is not observed.

    Args:
        call: Called with the positional arguments of the hook.
    """

    def __init__(self, call: Callable[..., None]) -> None:
        self._call = call

    def __call__(self, *args: Any) -> None:
        if not torch.compiler.is_dynamo_compiling():
            self._call(*args)

    def __reduce__(self) -> Any:
        return getattr, (nullcontext(), "__exit__")  # files with a model can be read without Shardscope


def _between(
    before: _Hook, forward: Callable[..., Any], after: _Hook, module: nn.Module
) -> Callable[..., Any]:
    """Return a function that calls `forward` between two hooks of a module."""

    def call(*args: Any, **kwargs: Any) -> Any:
        output = None
        before(module, args, kwargs)
        try:
            output = forward(*args, **kwargs)
        finally:
            after(module, args, output)
        return output

    return call


def is_compiled(model: nn.Module) -> bool:
    """Return whether `torch.compile` or ``Module.compile`` has compiled the model."""
    return hasattr(model, "_orig_mod") or getattr(model, "_compiled_call_impl", None) is not None


def _parts(model: nn.Module) -> Iterator[nn.Module]:
    """Yield the modules that a model may call separately: its children, and the modules in its lists and mappings."""
    if is_compiled(model):  # its parts are traced with it
        return
    for child in model.children():
        if isinstance(child, nn.ModuleList | nn.ModuleDict):
            yield from _parts(child)
        elif next(child.parameters(), None) is not None:
            yield child
