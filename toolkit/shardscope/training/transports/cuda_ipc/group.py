"""The CUDA IPC transport: ranks on GPUs of one host read each other's GPU memory, also if they share a GPU.

    DeviceMemory, Arena     memory that other processes can open, and a rank's part of it for outgoing messages
    DeviceMailbox           messages of tensors on a device
    DeviceSlots             collectives of large tensors, for ranks that share a GPU
    StagedCollectives       collectives of small tensors, for ranks that share a GPU
    CudaIpcGroup            the process group

Messages have tags, which NCCL does not support, and NCCL refuses two ranks on one GPU. With one GPU per rank, the
collectives of tensors on GPUs are NCCL's.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from shardscope.training.transports.cuda_ipc.collectives import STAGED_BYTES, DeviceSlots, StagedCollectives
from shardscope.training.transports.cuda_ipc.memory import CudaMemory, check_sharing
from shardscope.training.transports.cuda_ipc.messages import DeviceMailbox
from shardscope.training.transports.shm import CannotShare, SharedMemoryGroup
from shardscope.training.transports.shm.collectives import Collectives
from shardscope.training.transports.shm.messages import ANY
from shardscope.training.transports.shm.works import CollectiveWork


class CudaIpcGroup(SharedMemoryGroup):
    """Process group of ranks on the GPUs of one host; tensors in CPU memory go through shared memory.

    Args:
        tcp: The TCP group.
        store: The group's store.
        timeout: Time after which a rank that waits for another fails.
        device: This rank's GPU.
        has_nccl: Whether the TCP group's collectives of GPU tensors are NCCL's, which are then used.

    Raises:
        CannotShare: The ranks are not on one host, or cannot open the same memory; all ranks raise it.
    """

    def __init__(
        self,
        tcp: dist.ProcessGroup,
        store: dist.Store,
        timeout: timedelta,
        device: torch.device,
        *,
        has_nccl: bool,
    ) -> None:
        super().__init__(tcp, store, timeout)
        self._gpu, self._memory, self._has_nccl = device, CudaMemory(device), has_nccl
        self._store = dist.PrefixStore("device", store)
        try:
            check_sharing(self._memory, dist.PrefixStore("check", self._store), self.rank(), self.size())
        except CannotShare:
            self._peers.close()
            self._peers.memory.close()
            raise
        self._device = DeviceMailbox(self._mailbox, self._memory, self._store, self.rank())
        self._staged = StagedCollectives(self._in_ram)
        self._on_device: DeviceSlots | None = None

    def _get_backend(self, device: torch.device) -> Any:  # noqa: ARG002 - the same for both kinds of memory
        return self

    def set_timeout(self, timeout: timedelta) -> None:
        """Set the time after which a rank that waits for another fails."""
        super().set_timeout(timeout)
        self._timeout_s = timeout.total_seconds()
        if self._on_device is not None:
            self._on_device.timeout_s = self._timeout_s

    def send(self, tensors: list[Tensor], dst: int, tag: int) -> dist.Work:
        (tensor,) = tensors
        return super().send(tensors, dst, tag) if tensor.is_cpu else self._device.send(tensor, dst, tag)

    def recv(self, tensors: list[Tensor], src: int, tag: int) -> dist.Work:
        (tensor,) = tensors
        return super().recv(tensors, src, tag) if tensor.is_cpu else self._device.receive(tensor, src, tag)

    def recv_anysource(self, tensors: list[Tensor], tag: int) -> dist.Work:
        (tensor,) = tensors
        if tensor.is_cpu:
            return super().recv_anysource(tensors, tag)
        return self._device.receive(tensor, ANY, tag)

    def _collectives_of(self, tensors: Sequence[Tensor]) -> Collectives | None:
        if not all(tensor.is_cuda and tensor.layout == torch.strided for tensor in tensors):
            return super()._collectives_of(tensors)
        if self._has_nccl:
            return None
        if max((tensor.nbytes for tensor in tensors), default=0) <= STAGED_BYTES:
            return self._staged
        if self._on_device is None:  # all ranks get here at their first large tensor
            self._on_device = DeviceSlots(
                self._peers, self._barrier, self._timeout_s,
                memory=self._memory, store=dist.PrefixStore("slots", self._store),
            )  # fmt: skip
        return self._on_device

    def _submit(self, by: Collectives, run: Callable[[], None], result: Any, options: Any) -> dist.Work:
        """Run a collective of tensors on the GPU on the stream of its caller, and wait until the GPU is done."""
        if by is self._in_ram:
            return super()._submit(by, run, result, options)
        stream = torch.cuda.current_stream(self._gpu)

        def on_stream() -> None:
            with torch.cuda.stream(stream):
                run()
                self._memory.synchronize()

        work = CollectiveWork(on_stream, result, [stream.device])
        return self._thread.submit(work, is_async=getattr(options, "asyncOp", True))

    def shutdown(self) -> None:
        """Leave the group once the other ranks have fetched this rank's messages, and release all resources."""
        self._device.drain(self._peers)
        self._on_device = None
        super().shutdown()
