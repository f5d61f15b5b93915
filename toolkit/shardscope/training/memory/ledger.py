"""Log of the storages that operations allocate and free during a step, to estimate memory.

The memory of parameter gradients does not grow with the batch size; the memory of other results of the backward pass
does. Which results were parts of a gradient is known only when the gradient is complete. So `AllocationLedger` records
events during the step, and `AllocationLedger.gradients` evaluates them afterwards.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from shardscope.training.memory.storages import Storages, num_bytes, storages

_PASSED_ON = {
    torch.ops.aten.add.Tensor,
    torch.ops.aten.add_.Tensor,
    torch.ops.aten.clone.default,
    torch.ops.aten.copy_.default,
}
"""Operations with which autograd sums the gradients of a parameter that is used several times, or copies a gradient."""


class Made(NamedTuple):
    """Event: a storage was allocated.

    Attributes:
        storage: Serial number of the storage.
        num_bytes: Size of the storage in bytes.
    """

    storage: int
    num_bytes: int


class Freed(NamedTuple):
    """Event: the storage with this serial number was freed."""

    storage: int


class Placed(NamedTuple):
    """Event: a storage became the gradient of a parameter.

    Attributes:
        storage: Serial number of the storage.
        owner: Number that the caller chose for the parameter.
    """

    storage: int
    owner: int


class Scratch(NamedTuple):
    """Workspace of an operation at one moment while it runs.

    Attributes:
        grows: Bytes that are proportional to the number of samples.
        fixed: Bytes that do not depend on it, such as a copy of a weight.
    """

    grows: int
    fixed: int = 0


class AllocationLedger(TorchDispatchMode):
    """Dispatch mode that records when each storage is allocated and freed; also works on fake tensors.

    Args:
        held: Storages that exist during the whole step; they are not recorded.
        after: Called after each operation, while its inputs, its results and its scratch memory are in memory; once
            for each moment if that memory changes.
        scratch: Function from an operation, its arguments and its results to the workspace that it allocates while it
            runs.

    Attributes:
        held: The same argument.
        events: The recorded events, in order; a caller may add its own.
        num_operations: Number of operations that returned tensors; operations that return views are not counted.
        moved_bytes: Total bytes read and written by these operations, without operations whose time is computed from
            their FLOPs (such as matrix products).
        product_elements: Number of elements of the arguments and results of operations whose time is computed from
            their FLOPs, without tensors that exist during the whole step.
        weight_elements: Number of elements of those arguments and results that exist during the whole step, such as
            weights.
    """

    def __init__(
        self,
        held: Storages,
        after: Callable[[], None],
        scratch: Callable[[Any, Any, Any], Sequence[Scratch]] = lambda *_: (),
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.events: list[Any] = []
        self.num_operations = 0
        self.moved_bytes = self.product_elements = self.weight_elements = 0
        self.held, self._after, self._scratch = held, after, scratch
        self._alive: dict[int, tuple[int, weakref.ref[torch.UntypedStorage]]] = {}
        self._sums: list[tuple[set[int], set[int]]] = []
        self._num_made = 0
        self._fixed: set[int] = set()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        results = func(*args, **(kwargs or {}))
        made = [self._serial(storage) for storage in _storages_in(results)]
        if made and not func.is_view:
            self.num_operations += 1
            tensors = leaf_tensors((args, results))
            if func.overloadpacket not in flop_registry:
                self.moved_bytes += sum(map(num_bytes, tensors))
            else:
                held = sum(each.numel() for each in tensors if None not in self.held.kinds(each))
                self.weight_elements += held
                self.product_elements += sum(each.numel() for each in tensors) - held
        if func in _PASSED_ON:
            taken = {self._serial(storage) for storage in _storages_in(args)}
            self._sums.append((set(made), taken))
        for moment in self._scratch(func, args, results) or (Scratch(0),):
            with self._taken(moment.grows), self._taken(moment.fixed, is_fixed=True):
                self._after()
        return results

    @contextmanager
    def _taken(self, num_bytes: int, *, is_fixed: bool = False) -> Iterator[None]:
        """Return a context manager in which an operation's scratch memory is allocated."""
        if not num_bytes:
            yield
            return
        self._num_made += 1
        serial = self._num_made
        if is_fixed:
            self._fixed.add(serial)
        self.events.append(Made(serial, num_bytes))
        yield
        self.events.append(Freed(serial))

    def place(self, parameter: nn.Parameter, owner: int) -> None:
        """Record that the gradient of `parameter` is complete; `owner` is a number chosen by the caller."""
        assert parameter.grad is not None
        for storage in storages(parameter.grad):
            self.events.append(Placed(self._serial(storage), owner))

    def gradients(self) -> set[int]:
        """Return the serial numbers of storages that do not grow with the batch.

        These were a parameter's gradient, or were added or copied to one, or were scratch memory of a fixed size.
        """
        found = self._fixed | {event.storage for event in self.events if isinstance(event, Placed)}
        for made, taken in reversed(self._sums):
            if made & found:
                found |= taken
        return found

    @property
    def largest_bytes(self) -> int:
        """Size of the largest storage that is not part of a parameter's gradient; 0 if there is none."""
        gradients = self.gradients()
        made = [event for event in self.events if isinstance(event, Made) and event.storage not in gradients]
        return max((event.num_bytes for event in made), default=0)

    def _serial(self, storage: torch.UntypedStorage) -> int:
        """Return the serial number of a storage, and record its allocation if it is new; 0 for storages in `held`."""
        if storage in self.held:
            return 0
        key = id(storage)  # unique while the storage exists
        if key not in self._alive:
            self._num_made += 1
            self._alive[key] = self._num_made, weakref.ref(storage, partial(self._freed, key))
            self.events.append(Made(self._num_made, storage.nbytes()))
        return self._alive[key][0]

    def _freed(self, key: int, _: weakref.ref[torch.UntypedStorage]) -> None:
        serial, _ = self._alive.pop(key)
        self.events.append(Freed(serial))


def leaf_tensors(values: Any) -> list[Tensor]:
    """Return the tensors in nested tuples, lists and mappings, as PyTorch's pytree functions find them."""
    return [leaf for leaf in tree_leaves(values) if isinstance(leaf, Tensor)]


def _storages_in(values: Any) -> list[torch.UntypedStorage]:
    return [storage for leaf in leaf_tensors(values) for storage in storages(leaf)]
