"""Copies of the ranks' state in host memory, from which a run restarts without reading the disk (Gemini, SOSP 2023).

A copy is a checkpoint in a folder in memory, so the same code writes, verifies and loads it. On several nodes, each
rank also sends its file to a rank of the next node. The files of a lost node are then on the next node: before loading,
the ranks complete the folders of all nodes over the network.
"""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
import torch.distributed as dist

from shardscope.errors import CheckpointError
from shardscope.spec.units import bytes_text
from shardscope.training.checkpoint import memory
from shardscope.training.checkpoint.agreement import gather_items
from shardscope.training.checkpoint.index import FILE
from shardscope.training.checkpoint.memory import HeldStep
from shardscope.training.checkpoint.saving import Saver
from shardscope.training.checkpoint.writing import CheckpointPart, Report
from shardscope.training.context import RankContext

_VERSIONS = 2
"""Number of copies in memory while a new one is written; the previous copy is deleted only afterwards."""


class ReplicaSaver(Saver):
    """Keeps the newest state of each rank in the host memory of its own node and of the next node.

    Args:
        folder: Folder in the memory of this rank's node.
        **settings: The strategy and its optimizer, as for `Saver`.
    """

    event: ClassVar[str] = "replica"

    def __init__(self, folder: Path, **settings: Any) -> None:
        super().__init__(folder, keep=1, is_durable=False, **settings)
        self._node_size = self._context.local_world_size or self._context.world_size
        self._is_leader = self._context.rank % self._node_size == 0
        self._fits = False

    def _share(self, part: CheckpointPart, reports: Sequence[Report]) -> None:
        if not self._fits:
            self._require_space(reports, part.step)
            self._fits = True
        size, step = self._context.world_size, self._node_size
        if size == step:
            return
        file = f"rank-{part.rank}.bin"
        own = _read(part.partial / file)
        source = (part.rank - step) % size
        theirs = torch.empty(reports[source].files[f"rank-{source}.bin"], dtype=torch.uint8)
        sent = dist.isend(own, (part.rank + step) % size) if len(own) else None
        if len(theirs):
            dist.recv(theirs, source)
        if sent is not None:
            sent.wait()
        (part.partial / f"rank-{source}.bin").write_bytes(theirs.numpy().data)
        gather_items(self._context, None)  # no leader renames its folder before all have written to it

    def _require_space(self, reports: Sequence[Report], step: int) -> None:
        """Raise an error on all ranks if the memory of any node is too small for the copies."""
        copies = _VERSIONS * (1 if self._node_size == self._context.world_size else 2)
        sizes = [report.written_bytes for report in reports]
        # what earlier ranks left is deleted after this copy, before the next one
        free = gather_items(
            self._context, memory.free_bytes(self.folder) + memory.bytes_before(self.folder, step)
        )
        for first in range(0, len(sizes), self._node_size):
            held = sum(sizes[first : first + self._node_size])
            if copies * held - held > free[first]:  # the first copy has been written already
                raise CheckpointError(
                    f"recovery.replica_every keeps {bytes_text(copies * held)} in {self.folder.parent.parent}, which "
                    f"has only {bytes_text(free[first] + held)} of free memory; enlarge it (in a container: "
                    "--shm-size), or set replica_every=None to recover from the disk"
                )

    def _refusal(self, final: Path, error: OSError) -> CheckpointError:
        return CheckpointError(
            f"{error.strerror} while copying the state after {final.name} to {final.parent}; free memory there, or set "
            "replica_every=None to recover from the disk"
        )


def complete_everywhere(folder: Path, context: RankContext) -> Path | None:
    """Copy missing files of the newest step that the nodes together have to every node; all ranks call this together.

    Args:
        folder: Folder in the memory of this rank's node.
        context: This rank's context.

    Returns:
        Path of the complete copy on this node; None if the nodes together have no complete step.
    """
    per_node = context.local_world_size or context.world_size
    held = gather_items(context, memory.held_in(folder))
    newest = memory.newest_whole(held)
    if newest is None:
        return None
    path = folder / f"step-{newest.step}"
    if per_node == context.world_size:
        return path
    is_leader = context.rank % per_node == 0
    has = [_files_of(newest, steps) for steps in held]
    if is_leader and has[context.rank] is None:  # another step's, or damaged
        shutil.rmtree(path, ignore_errors=True)
        path.mkdir(mode=0o700, parents=True)
    for name in (FILE, *sorted(newest.wanted)):
        holders = [rank for rank, files in enumerate(has) if files is not None and name in files]
        if len(holders) == context.world_size:
            continue
        data = _broadcast(path / name, holders[0], context)
        if is_leader and context.rank not in holders:
            (path / name).write_bytes(data.numpy().data)
    gather_items(context, None)  # nobody reads before all is written
    return path


def _files_of(wanted: HeldStep, held: Sequence[HeldStep]) -> frozenset[str] | None:
    """Return the names of a node's files of a step, including the index; None if the node does not have the step."""
    for each in held:
        if (each.step, each.checksum) == (wanted.step, wanted.checksum):
            return each.files | {FILE}
    return None


def _broadcast(path: Path, holder: int, context: RankContext) -> torch.Tensor:
    """Broadcast a file from the rank `holder`; return its bytes."""
    is_holder = context.rank == holder
    size = gather_items(context, path.stat().st_size if is_holder else 0)[holder]
    data = _read(path) if is_holder else torch.empty(size, dtype=torch.uint8)
    if size:
        dist.broadcast(data, src=holder)
    return data


def _read(path: Path) -> torch.Tensor:
    return torch.from_numpy(np.fromfile(path, np.uint8))
