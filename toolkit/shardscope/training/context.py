"""The context of a rank: its rank number, device, process group and meter."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from shardscope.errors import LaunchError
from shardscope.runlog.writer import EventWriter
from shardscope.spec import Job, Link
from shardscope.spec.cluster.emulated import EmulatedNode
from shardscope.training import clock
from shardscope.training.collectives import process_group
from shardscope.training.collectives.paced_group import PacedProcessGroup
from shardscope.training.collectives.process_group import MeteredProcessGroup
from shardscope.training.compute_pace import ComputePace
from shardscope.training.emulation import Emulation
from shardscope.training.faults import RankFaults
from shardscope.training.meter import Meter
from shardscope.training.transports.cuda_ipc import STAGED_BYTES

SHARED_GPU = "gloo (shared GPU)"
"""Backend of ranks that share GPUs."""
_AS_FAST = EmulatedNode(upload=1, download=1)
"""A node as fast as this machine, for ranks that a fault slows down in some steps; its link rates are not used."""


@dataclass(frozen=True)
class RankContext:
    """One rank of a running job, with the objects that its strategy needs.

    Attributes:
        rank: This rank.
        world_size: Number of ranks.
        device: The device on which this rank computes.
        meter: Meter that records this rank's traffic and time spans.
        events: Writer for this rank's event log.
        group: The metered process group; None for a single-process job.
        backend: Backend for collectives: ``"gloo"``, ``"nccl"``, ``"gloo (shared GPU)"``, or ``"none"``.
        local_world_size: Number of this context's ranks on this machine; None if unknown.
        compresses: Whether the job compresses gradients.
        emulation: The emulated cluster that the rank runs on; None on real machines.
        faults: The faults that are injected on this rank; None if the run has no fault plan.
        axis: The axis whose ranks this context describes; None if it describes all ranks of the job.
        of_job: The context of all ranks of the job; None if this is it.
    """

    rank: int
    world_size: int
    device: torch.device
    meter: Meter
    events: EventWriter
    group: MeteredProcessGroup | None = None
    backend: str = "none"
    local_world_size: int | None = None
    compresses: bool = False
    emulation: Emulation | None = None
    faults: RankFaults | None = None
    axis: str | None = None
    of_job: RankContext | None = None

    @property
    def whole(self) -> RankContext:
        """The context of all ranks of the job, of which this context may describe one axis."""
        return self if self.of_job is None else self.of_job

    def on_axis(self, axis: str, group: MeteredProcessGroup | None) -> RankContext:
        """Return this rank's context for the ranks of one axis; without a group, the axis has only this rank."""
        rank, size = (0, 1) if group is None else (group.rank(), group.size())
        here = self._on_this_machine(group)
        return replace(
            self, rank=rank, world_size=size, group=group, local_world_size=here, axis=axis, of_job=self.whole
        )

    def _on_this_machine(self, group: MeteredProcessGroup | None) -> int | None:
        """Return how many ranks of a group are on this machine, where ranks have consecutive numbers."""
        size, rank = self.whole.local_world_size, self.whole.rank
        if size is None:
            return None
        ranks = [rank] if group is None else dist.get_process_group_ranks(group)
        return sum(each // size == rank // size for each in ranks)

    @property
    def transport(self) -> str:
        """Transport between ranks: ``"shm"``, ``"cuda-ipc"``, ``"tcp"``, or ``"none"`` for one rank."""
        return "none" if self.group is None else self.group.route.name

    def described_transport(self) -> dict[str, str]:
        """Return the transport and the reason for its choice, for the ``start`` event; empty for a single rank."""
        if self.group is None:
            return {}
        return {"transport": self.transport, "transport_reason": self.group.route.reason}

    def described_link(self, link: Link | None) -> dict[str, Any]:
        """Return the settings of the emulated link, the job's or the cluster's, for the ``start`` event.

        The settings include whether the emulation is accurate. The result is empty if no link is emulated.
        """
        if self.emulation is not None:
            return {"link": self.emulation.described()}
        if link is None or self.group is None:
            return {}
        figures = {"bandwidth": link.bandwidth, "latency_s": link.latency_s, "label": link.label}
        return {"link": {**figures, "is_accurate": link.can_be_paced}}

    def is_staged(self, num_bytes: int, rounds: int = 1) -> bool:
        """Return whether Shardscope's own collectives copy a tensor of this size through CPU memory.

        gloo cannot send GPU tensors. NCCL matches point-to-point messages by order instead of by tag, so Shardscope's
        ring, which posts receives in advance, would deadlock. CUDA IPC has neither limit, but gradients are compressed
        in CPU memory, and delayed messages leave on a thread that does not know their sender's stream. Ranks that share
        a GPU take turns on it, and a turn takes longer than copying a small tensor.

        Args:
            num_bytes: Size of the tensor.
            rounds: Number of messages that must follow each other, each of which takes a turn.
        """
        if self.device.type != "cuda":
            return False
        is_small = self.backend == SHARED_GPU and num_bytes <= rounds * STAGED_BYTES
        return self.transport != "cuda-ipc" or self.compresses or self.is_paced or is_small

    @property
    def shares_memory(self) -> bool:
        """Whether all ranks can use the same tensors: in CPU memory, or in the memory of one GPU."""
        on_one_gpu = self.backend == SHARED_GPU and torch.cuda.device_count() == 1
        return self.transport == "shm" or (self.transport == "cuda-ipc" and on_one_gpu)

    @property
    def is_paced(self) -> bool:
        """Whether this rank delays its messages: for the job's link, or for the latency of an emulated cluster."""
        return isinstance(self.group, PacedProcessGroup)

    def paced(self, is_on: bool = True) -> AbstractContextManager[None]:
        """Return a context manager that turns the delays of messages on or off, if this rank delays any."""
        group = self.group
        return group.pacer.switched(is_on) if isinstance(group, PacedProcessGroup) else nullcontext()


def choose_device(job: Job, local_rank: int, local_world_size: int) -> tuple[torch.device, str]:
    """Choose a rank's device and backend: NCCL with one GPU per rank, gloo if ranks share GPUs or run on the CPU.

    Raises:
        LaunchError: The job requires a GPU, but this machine has none.
    """
    num_gpus = 0 if job.device == "cpu" else torch.cuda.device_count()
    if not num_gpus:
        if job.device == "cuda":
            raise LaunchError(
                "device='cuda', but PyTorch finds no GPU on this machine; use device='auto' or 'cpu'"
            )
        return torch.device("cpu"), "gloo"
    device = torch.device("cuda", local_rank % num_gpus)
    return device, "nccl" if local_world_size <= num_gpus else "gloo"


@contextmanager
def open_rank(
    job: Job,
    events: EventWriter,
    env: dict[str, str] | None = None,
    faults: RankFaults | None = None,
) -> Iterator[RankContext]:
    """Return a context manager that joins the process group and yields this rank's context.

    Args:
        job: The job.
        events: Writer for this rank's event log.
        env: Environment variables with the rank and the world size, as set by `torchrun`; None for `os.environ`.
        faults: The faults that are injected on this rank.
    """
    place = os.environ if env is None else env
    rank, world_size = int(place["RANK"]), int(place["WORLD_SIZE"])
    local_rank, local_size = (
        int(place.get("LOCAL_RANK", rank)),
        int(place.get("LOCAL_WORLD_SIZE", world_size)),
    )
    device, backend = choose_device(job, local_rank, local_size)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    meter, emulation = Meter(), Emulation.from_env(place)

    def pace(processor: EmulatedNode = _AS_FAST) -> ComputePace:
        meter.pace = ComputePace(job, processor, is_on_gpu=device.type == "cuda")
        return meter.pace

    if emulation is not None and emulation.processor is not None:
        pace(emulation.processor)
    if faults is not None:
        faults.pace, faults.make_pace = meter.pace, pace
    if world_size == 1:
        yield RankContext(rank, 1, device, meter, events, emulation=emulation, faults=faults)
        return
    timeout = timedelta(seconds=job.timeout_s)
    group = process_group.init(
        meter,
        backend=backend,
        rank=rank,
        world_size=world_size,
        timeout=timeout,
        link=job.link if emulation is None else emulation.paced_link,
        limits_rate=emulation is None,
        transport=job.transport,
        on_gpu=device.type == "cuda",
    )
    clock.align(group.get_group_store(), rank)
    shared = device.type == "cuda" and backend == "gloo"
    label = SHARED_GPU if shared else backend
    compresses = job.compression.is_on
    yield RankContext(
        rank, world_size, device, meter, events, group, label, local_size, compresses, emulation, faults
    )
    dist.destroy_process_group()  # not after an error: it could block if another rank is stuck
