"""Measurement of activation memory: the tensors that autograd has saved for the backward pass.

Each tensor that an operation saves within `Activations.active` is counted until autograd releases it: when the
backward pass of that operation has run, or the graph is deleted. Parameters (this rank's own, or gathered), the model's
buffers and the step's inputs and targets are not counted, because they are in memory anyway. Copies of weights that
autocast converts to a 16-bit dtype and saves are counted. A storage is counted once, with all its bytes, even if
several operations or micro-batches save tensors that share it.

Recomputation also keeps tensors outside autograd's graph: those recomputed for the backward pass of a block, and the
results that selective recomputation keeps. Both are counted until they are freed; the `Recomputed` modules of
`shardscope.training.recompute` report them. If a model calls `torch.utils.checkpoint` itself, the inputs of the
checkpointed parts are counted, but recomputed tensors are not.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from functools import partial
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from shardscope.training._compat import top_saved_tensors_hooks
from shardscope.training.memory.storages import Storages, storages

_active: ContextVar[Activations | None] = ContextVar("activations", default=None)


def counting() -> Activations | None:
    """Return the `Activations` object that is active in this thread, or None if this step is not measured."""
    return _active.get()


class Activations:
    """Counts the bytes of the tensors saved for the backward pass.

    Args:
        held: Storages that are not counted, because they are in memory anyway, such as the model's buffers.
        changed: Called with the new total after each change.
        at_parameter: Called with a parameter, or a view of one, when autograd saves it, and again when the backward
            pass uses it: at both times, everything that the parameter's operation needs is in memory.

    Attributes:
        bytes: Current total, in bytes.
        peak: Maximum of the total so far, in bytes.
    """

    def __init__(
        self,
        held: Storages,
        at_parameter: Callable[[Tensor], None] = lambda _: None,
        changed: Callable[[int], None] = lambda _: None,
    ) -> None:
        self.bytes = 0
        self.peak = 0
        self._held = held
        self._at_parameter, self._changed = at_parameter, changed
        self._uses: dict[int, tuple[int, int]] = {}
        self._watched: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        self._lock = (
            threading.RLock()
        )  # graph nodes are freed in autograd's backward threads, or by the garbage collector

    @contextmanager
    def active(self) -> Iterator[None]:
        """Return a context manager within which the tensors that autograd saves in this thread are counted."""
        token = _active.set(self)
        try:
            with saved_tensors_hooks(self._save, _Saved.unpack):
                yield
        finally:
            _active.reset(token)

    def watch(self, tensor: Tensor) -> None:
        """Count a tensor that autograd has not saved, until its memory is freed; a saved tensor is counted already."""
        if _is_parameter(tensor):  # a part that is computed again saves it outside `_save`
            self._at_parameter(tensor)
        if self._is_held(tensor):
            return
        for storage in storages(tensor):
            key = id(storage)
            with self._lock:
                if key not in self._uses:
                    self._watched[key] = weakref.ref(storage, partial(self._freed, key))
                    self._use(storage)

    def recomputing(self) -> AbstractContextManager[None]:
        """Return a context manager that counts the tensors saved while a checkpointed part is recomputed."""
        return _Recomputing(self)

    def keeping(self, operations: Collection[Any]) -> TorchDispatchMode:
        """Return a dispatch mode that counts the results of `operations`, kept by the caller, until they are freed."""
        return _Keeping(self, operations)

    def _save(self, tensor: Tensor) -> _Saved:
        if _is_parameter(tensor):
            self._at_parameter(tensor)
            return _Saved(tensor, (), self._at_parameter)
        found = () if self._is_held(tensor) else tuple(storages(tensor))
        for storage in found:
            self._use(storage)
        return _Saved(tensor, [partial(self._release, id(storage)) for storage in found])

    def _is_held(self, tensor: Tensor) -> bool:
        return _is_parameter(tensor) or any(storage in self._held for storage in storages(tensor))

    def _use(self, storage: torch.UntypedStorage) -> None:
        key = id(storage)  # unique while the storage exists
        with self._lock:
            num_uses, num_bytes = self._uses.get(key, (0, storage.nbytes()))
            self._uses[key] = num_uses + 1, num_bytes
            if not num_uses:
                self.bytes += num_bytes
                self.peak = max(self.peak, self.bytes)
                self._changed(self.bytes)

    def _release(self, key: int) -> None:
        with self._lock:
            num_uses, num_bytes = self._uses.pop(key)
            if num_uses > 1:
                self._uses[key] = num_uses - 1, num_bytes
            else:
                self.bytes -= num_bytes
                self._changed(self.bytes)

    def _freed(self, key: int, _: weakref.ref[torch.UntypedStorage]) -> None:
        with self._lock:
            del self._watched[key]
            self._release(key)


def _is_parameter(tensor: Tensor) -> bool:
    """Return whether a tensor is a parameter or a view of one."""
    return isinstance(tensor if tensor._base is None else tensor._base, nn.Parameter)  # noqa: SLF001


class _Saved:
    """Object that an autograd node stores in place of a saved tensor; deleted when the node releases the tensor.

    Args:
        tensor: The saved tensor.
        at_end: Functions to call when this object is deleted.
        at_use: Function to call with the tensor when the backward pass reads it.
    """

    __slots__ = ("at_end", "at_use", "tensor")

    def __init__(
        self,
        tensor: Tensor,
        at_end: Sequence[Callable[[], None]],
        at_use: Callable[[Tensor], None] | None = None,
    ) -> None:
        self.tensor = tensor.detach()  # avoids a reference cycle if an operation saves its own output
        self.at_end, self.at_use = at_end, at_use

    def unpack(self) -> Tensor:
        """Return the saved tensor to the backward pass."""
        if self.at_use is not None:
            self.at_use(self.tensor)
        return self.tensor

    def __del__(self) -> None:
        for call in self.at_end:
            call()


class _Recomputing(AbstractContextManager[None]):
    """Context manager that counts the tensors saved while `torch.utils.checkpoint` recomputes a part of a model."""

    def __init__(self, activations: Activations) -> None:
        self._activations = activations

    def __enter__(self) -> None:
        pack, unpack = top_saved_tensors_hooks()  # of the checkpoint; only the innermost hooks are called

        def watch_and_pack(tensor: Tensor) -> Any:
            self._activations.watch(tensor)
            return pack(tensor)

        self._hooks = saved_tensors_hooks(watch_and_pack, unpack)
        self._hooks.__enter__()

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, tb: TracebackType | None
    ) -> None:
        self._hooks.__exit__(kind, value, tb)


class _Keeping(TorchDispatchMode):
    """Dispatch mode that counts the results of the given operations until they are freed."""

    def __init__(self, activations: Activations, operations: Collection[Any]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.activations, self.operations = activations, operations

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        results = func(*args, **(kwargs or {}))
        if func in self.operations:
            for result in tree_leaves(results):
                if isinstance(result, Tensor):
                    self.activations.watch(result)
        return results
