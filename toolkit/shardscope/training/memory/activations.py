"""Activations: tensors that autograd has saved for coming backward passes.

Every tensor that an operation saves within `Activations.active` counts, from that moment until the graph releases it:
when the node has run backward, or the graph is dropped. Parameters (of this rank or gathered from others), the model's
buffers and the step's inputs and targets do not count, as they are held anyway. Copies of weights that autocast makes
in a short format and saves do count. A storage counts whole and once, however many operations and micro-batches save
tensors of it.

Recomputation saves tensors in two places outside the graph. Tensors recomputed for a block's backward pass count until
they are freed, and so do the results that selective recomputation keeps. `Recomputed` modules of
`shardscope.training.recompute` report both. For a model that calls `torch.utils.checkpoint` itself, the inputs count,
but recomputed tensors do not.
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
    """The current counter of activations in this thread; None except on measured steps."""
    return _active.get()


class Activations:
    """Bytes saved for the backward pass: `bytes` is the current total, `peak` the maximum so far.

    Args:
        held: Storages that are held anyway.
        at_parameter: Called with each parameter, or view of one, when it is saved and again when it is used: at that
            moment everything that its operation needs is in memory.
    """

    def __init__(self, held: Storages, at_parameter: Callable[[Tensor], None] = lambda _: None) -> None:
        self.bytes = 0
        self.peak = 0
        self._held = held
        self._at_parameter = at_parameter
        self._uses: dict[int, tuple[int, int]] = {}
        self._watched: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        self._lock = (
            threading.RLock()
        )  # nodes are freed on the backward pass's own threads, or by the collector

    @contextmanager
    def active(self) -> Iterator[None]:
        """Context in which the tensors that autograd saves in this thread are counted."""
        token = _active.set(self)
        try:
            with saved_tensors_hooks(self._save, _Saved.unpack):
                yield
        finally:
            _active.reset(token)

    def watch(self, tensor: Tensor) -> None:
        """Count a tensor until its memory is freed, whatever holds it; one that is saved already counts as saved."""
        if self._is_held(tensor):
            return
        for storage in storages(tensor):
            key = id(storage)
            with self._lock:
                if key not in self._uses:
                    self._watched[key] = weakref.ref(storage, partial(self._freed, key))
                    self._use(storage)

    def recomputing(self) -> AbstractContextManager[None]:
        """Context for a checkpoint's recomputation in the backward pass that counts the tensors it keeps."""
        return _Recomputing(self)

    def keeping(self, operations: Collection[Any]) -> TorchDispatchMode:
        """Context in which the results of these operations count until they are freed, as the caller keeps them."""
        return _Keeping(self, operations)

    def _save(self, tensor: Tensor) -> _Saved:
        if _is_parameter(tensor):
            self._at_parameter(tensor)
            return _Saved(tensor, (), self._at_parameter)
        found = () if self._is_held(tensor) else tuple(storages(tensor))
        for storage in found:
            self._use(storage)
        return _Saved(tensor, [partial(self._let_go, id(storage)) for storage in found])

    def _is_held(self, tensor: Tensor) -> bool:
        return _is_parameter(tensor) or any(storage in self._held for storage in storages(tensor))

    def _use(self, storage: torch.UntypedStorage) -> None:
        key = id(storage)  # the same as long as the storage lives
        with self._lock:
            num_uses, num_bytes = self._uses.get(key, (0, storage.nbytes()))
            self._uses[key] = num_uses + 1, num_bytes
            if not num_uses:
                self.bytes += num_bytes
                self.peak = max(self.peak, self.bytes)

    def _let_go(self, key: int) -> None:
        with self._lock:
            num_uses, num_bytes = self._uses.pop(key)
            if num_uses > 1:
                self._uses[key] = num_uses - 1, num_bytes
            else:
                self.bytes -= num_bytes

    def _freed(self, key: int, _: weakref.ref[torch.UntypedStorage]) -> None:
        with self._lock:
            del self._watched[key]
            self._let_go(key)


def _is_parameter(tensor: Tensor) -> bool:
    """Whether a tensor is a parameter or a view of one."""
    return isinstance(tensor if tensor._base is None else tensor._base, nn.Parameter)  # noqa: SLF001


class _Saved:
    """Placeholder that a graph node holds instead of a tensor; it lives as long as the node needs it."""

    __slots__ = ("at_end", "at_use", "tensor")

    def __init__(
        self,
        tensor: Tensor,
        at_end: Sequence[Callable[[], None]],
        at_use: Callable[[Tensor], None] | None = None,
    ) -> None:
        self.tensor = (
            tensor.detach()
        )  # an operation's own output would form a reference cycle with the operation
        self.at_end, self.at_use = at_end, at_use

    def unpack(self) -> Tensor:
        """Return the tensor for the backward pass."""
        if self.at_use is not None:
            self.at_use(self.tensor)
        return self.tensor

    def __del__(self) -> None:
        for call in self.at_end:
            call()


class _Recomputing(AbstractContextManager[None]):
    """Counts the tensors that a checkpoint saves when it runs a part of the forward pass again."""

    def __init__(self, activations: Activations) -> None:
        self._activations = activations

    def __enter__(self) -> None:
        pack, unpack = top_saved_tensors_hooks()  # the checkpoint's own: only the innermost hooks are called

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
    """Counts the results of some operations."""

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
