"""Hooks on `GradScaler` that distinguish a loss from its scaled copy, and notice updates that the scaler skips."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from functools import partial, wraps
from typing import Any

from torch import Tensor
from torch.amp import GradScaler
from torch.optim import Optimizer
from torch.utils.weak import WeakTensorKeyDictionary


class ScalerWatch:
    """Stores the value of each loss before scaling, and calls `skipped` for an optimizer that was not stepped.

    Args:
        skipped: Called with the optimizer of an update that a scaler skipped because of an overflow.
    """

    def __init__(self, skipped: Callable[[Optimizer], None]) -> None:
        self._skipped = skipped
        self._losses = WeakTensorKeyDictionary()
        self._num_updates = 0
        self._is_stepping = False

    def install(self, undo: ExitStack) -> None:
        """Replace the methods of all scalers, until `undo` is closed."""
        for kind in (GradScaler, *GradScaler.__subclasses__()):  # FSDP's has a `scale` of its own
            for name, hook in (("scale", self._scale), ("step", self._step)):
                original = vars(kind).get(name)
                if original is not None:
                    setattr(kind, name, _around(original, hook))
                    undo.callback(setattr, kind, name, original)

    def unscaled(self, roots: Any) -> Any:
        """Return the losses of which `roots` are the scaled copies; anything else is returned unchanged."""
        if isinstance(roots, Tensor):
            return self._losses.get(roots, roots)
        return [self.unscaled(each) for each in roots] if isinstance(roots, list | tuple) else roots

    def count_update(self) -> None:
        """Note that an optimizer has stepped."""
        self._num_updates += 1

    def _scale(self, original: Callable[..., Any], outputs: Any) -> Any:
        scaled = original(outputs)
        several = isinstance(outputs, list | tuple)
        for before, after in zip(outputs, scaled, strict=True) if several else [(outputs, scaled)]:
            if isinstance(before, Tensor) and after is not before:
                self._losses[after] = before
        return scaled

    def _step(self, original: Callable[..., Any], optimizer: Optimizer, *args: Any, **kwargs: Any) -> Any:
        if self._is_stepping:  # a subclass calls the method that it overrides
            return original(optimizer, *args, **kwargs)
        before, self._is_stepping = self._num_updates, True
        try:
            result = original(optimizer, *args, **kwargs)
        finally:
            self._is_stepping = False
        if self._num_updates == before:
            self._skipped(optimizer)
        return result


def _around(original: Callable[..., Any], hook: Callable[..., Any]) -> Callable[..., Any]:
    """Return a method that calls `hook` with the bound original method and the arguments."""

    @wraps(original)
    def method(scaler: GradScaler, *args: Any, **kwargs: Any) -> Any:
        return hook(partial(original, scaler), *args, **kwargs)

    return method
