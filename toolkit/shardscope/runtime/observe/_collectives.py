"""Count every collective that torch starts, in Python or in C++, without changing any of them.

`DistributedDataParallel`, FSDP2, functional collectives and ``dist.all_reduce`` all call an operator of the library
``c10d``, which torch's dispatcher passes on to the backend of the process group. ``BackendSelect`` is the last dispatch
key before the backend's own kernel. `CollectiveMeter` registers kernels for this key, which count each call and pass it
on with the same arguments. So calls in groups that were created earlier are counted too, and torch is unchanged once
the kernels are removed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from shardscope.training.collectives.process_group import backend_traffic, not_sized, num_bytes
from shardscope.training.meter import Meter, Traffic

Finished = Callable[[], None]
Started = Callable[[str, int], Finished]
"""Called when a collective starts, with its name and payload in bytes; returns a function to call when it has ended."""

_PAYLOAD_OF = {
    "allreduce_": ("all_reduce", 0),
    "allreduce_coalesced_": ("all_reduce", 0),
    "broadcast_": ("broadcast", 0),
    "reduce_": ("reduce", 0),
    "allgather_": ("all_gather", 0),
    "_allgather_base_": ("all_gather", 0),
    "allgather_coalesced_": ("all_gather", 0),
    "allgather_into_tensor_coalesced_": ("all_gather", 0),
    "reduce_scatter_": ("reduce_scatter", 1),
    "_reduce_scatter_base_": ("reduce_scatter", 1),
    "reduce_scatter_tensor_coalesced_": ("reduce_scatter", 1),
    "alltoall_": ("all_to_all", 1),
    "alltoall_base_": ("all_to_all", 1),
    "gather_": ("gather", 1),
    "scatter_": ("scatter", 0),
    "barrier": ("barrier", None),
    "monitored_barrier_": ("barrier", None),
    "send": ("send", 0),
    "recv_": ("recv", 0),
    "recv_any_source_": ("recv", 0),
}
"""For each operator, the name of its collective and the index of the argument that contains its payload.

They agree with `MeteredProcessGroup`."""


class CollectiveMeter:
    """Counts every collective of this process in `meter`, from `install` to `remove`.

    Args:
        meter: Counts bytes and messages.
        started: Called for each collective that starts, to record its span.
        guard: Runs a function of the observer such that its errors never reach the training loop.
    """

    def __init__(self, meter: Meter, started: Started, guard: Callable[[Callable[[], None]], None]) -> None:
        self._meter, self._started, self._guard = meter, started, guard
        self._library: Any = None
        self._waits = _Waits(guard)
        self._backends: dict[tuple[str, str], str] = {}

    def install(self) -> None:
        """Register kernels that run before the kernels of the backend."""
        if not hasattr(torch.ops.c10d, "allreduce_"):  # torch was built without torch.distributed
            return
        self._library = torch.library.Library("c10d", "IMPL")
        after = torch._C._dispatch_keyset_full_after(torch._C.DispatchKey.BackendSelect)  # noqa: SLF001
        for name, (called, payload_of) in _PAYLOAD_OF.items():
            operator = getattr(torch.ops.c10d, name, None)
            if operator is not None:  # not every release of torch has every operator
                kernel = self._kernel(operator.default, called, payload_of, after)
                self._library.impl(name, kernel, "BackendSelect", with_keyset=True)
        self._waits.install()

    def remove(self) -> None:
        """Remove the kernels."""
        self._waits.remove()
        if self._library is not None:
            self._library._destroy()  # noqa: SLF001 - as torch.library._scoped_library does
            self._library = None

    def end_step(self) -> None:
        """Forget collectives from the previous step on whose end no Python code has waited."""
        self._waits.end_step()

    def _kernel(self, operator: Any, name: str, payload_of: int | None, after: Any) -> Callable[..., Any]:
        def kernel(keys: Any, *arguments: Any, **options: Any) -> Any:
            finished: list[Finished] = []
            self._guard(lambda: finished.append(self._book(name, payload_of, arguments)))
            result = operator.redispatch(keys & after, *arguments, **options)
            if finished:
                self._guard(lambda: self._follow(result, finished[0]))
            return result

        return kernel

    def _book(self, name: str, payload_of: int | None, arguments: tuple[Any, ...]) -> Finished:
        counted_as, traffic = name, Traffic(calls=1)
        if payload_of is not None:
            try:
                traffic = self._traffic(name, payload_of, arguments)
            except Exception:  # noqa: BLE001 - whatever it is, the recording goes on
                counted_as = not_sized(name)
        self._meter.count(counted_as, traffic)
        return self._started(name, traffic.payload_bytes)

    def _traffic(self, name: str, payload_of: int, arguments: tuple[Any, ...]) -> Traffic:
        boxed = next(each for each in arguments if isinstance(each, torch.ScriptObject))
        group = dist.ProcessGroup.unbox(boxed)
        own = [each for each in arguments if each is not boxed]
        if name in ("send", "recv"):
            return self._message(name, num_bytes(own[0]), group, own[1])
        return backend_traffic(
            name, payload_of, own, group, self._backend(group, _device_of(own[payload_of]))
        )

    def _message(self, name: str, size: int, group: dist.ProcessGroup, peer: int) -> Traffic:
        if name == "recv":
            return Traffic(size, received_bytes=size, calls=1)
        target = dist.get_global_rank(group, peer)
        return Traffic(size, sent_bytes=size, messages=1, calls=1, sent_to={target: size})

    def _backend(self, group: dist.ProcessGroup, device: torch.device | None) -> str:
        if device is None:
            return ""
        key = group.group_name, device.type
        if key not in self._backends:
            self._backends[key] = group._get_backend(device).name()  # noqa: SLF001
        return self._backends[key]

    def _follow(self, result: Any, finished: Finished) -> None:
        """Arrange for `finished` to be called when the collective has ended."""
        boxed = result[-1] if isinstance(result, tuple) else result
        if boxed is None:  # one of several collectives that are started together
            return
        work = dist.Work.unbox(boxed)
        try:
            future = work.get_future()
        except RuntimeError:  # gloo's messages and reduce-scatters have no future: watch `wait`
            self._waits.watch(work, finished)
        else:
            future.add_done_callback(lambda _: self._guard(finished))


class _Waits:
    """Detects when Python code has waited for a `dist.Work`, for works that have no future.

    Waiting for them in a separate thread is impossible, because gloo's reduce-scatter copies its result in `wait`.
    """

    def __init__(self, guard: Callable[[Callable[[], None]], None]) -> None:
        self._guard = guard
        self._works: dict[dist.Work, Finished] = {}
        self._older: set[dist.Work] = set()
        self._wait: Any = None

    def watch(self, work: dist.Work, finished: Finished) -> None:
        """Arrange for `finished` to be called after `work.wait()`.

        The reference to `work` is kept, so that Python code that waits gets the same object.
        """
        self._works[work] = finished

    def end_step(self) -> None:
        """Forget works on which no Python code has waited since the end of the previous step."""
        for work in self._older:
            self._works.pop(work, None)
        self._older = set(self._works)

    def install(self) -> None:
        """Replace `Work.wait` with a function that calls the original, then the `finished` of that work."""
        original = self._wait = dist.Work.wait

        def wait(work: dist.Work, *arguments: Any, **options: Any) -> Any:
            done = original(work, *arguments, **options)
            finished = self._works.pop(work, None)
            if finished is not None:
                self._guard(finished)
            return done

        dist.Work.wait = wait  # type: ignore[method-assign, assignment]

    def remove(self) -> None:
        """Restore the original `Work.wait`."""
        if self._wait is not None:
            dist.Work.wait = self._wait  # type: ignore[method-assign]
            self._wait = None
        self._works.clear()
        self._older.clear()


def _device_of(tensors: Any) -> torch.device | None:
    """Return the device of the first tensor in nested sequences; None if there is none."""
    while not isinstance(tensors, torch.Tensor):
        if not tensors:
            return None
        tensors = tensors[0]
    return tensors.device
