"""Host memory of one run in which its ranks keep copies of their state; the run's agent creates and removes it.

The copies are files in /dev/shm, in a folder that only the user can read. They survive the ranks. If an agent is killed
and cannot remove them, the next agent of the same user in the same container does, whatever its job.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from shardscope.errors import LaunchError, ShardscopeError
from shardscope.runtime.record.processes import is_alive, process_started
from shardscope.runtime.record.rundir import RunDir

if TYPE_CHECKING:
    from shardscope.runtime.agent.failure import Ending

_MEMORY = Path("/dev/shm")  # noqa: S108 - the folder in it is private to the user
_NAME = re.compile(r"shardscope-replicas-(\d+)-(\d+)-([\w-]+)-(\d+)")
"""Pattern of a folder's name: number of the agent's pid namespace, the agent's pid, and its start time in two parts."""


def memory_for(run: RunDir) -> tuple[ReplicaMemory | None, str]:
    """Return the memory for copies of a run's state (None if it keeps no copies), and the reason if memory is needed
    but unavailable.

    Also removes folders left by killed agents.
    """
    remove_leftovers()
    recovery = run.read_job().recovery
    if recovery is None or recovery.replica_every is None:
        return None, ""
    try:
        return ReplicaMemory.create(), ""
    except LaunchError as error:
        return None, str(error)


@dataclass(frozen=True)
class ReplicaMemory:
    """The folder in memory of one run."""

    path: Path

    @classmethod
    def create(cls, memory: Path = _MEMORY) -> ReplicaMemory:
        """Create the folder, named after this process.

        Raises:
            LaunchError: The system has no file system in memory, or it cannot be written to.
        """
        if sys.platform != "linux" or not memory.is_dir():
            raise LaunchError(
                f"recovery.replica_every needs {memory}, which this system does not have; set replica_every=None to "
                "recover from the disk"
            )
        path = memory / _name(os.getpid(), str(process_started()))
        try:
            path.mkdir(mode=0o700)
        except OSError as error:
            raise LaunchError(
                f"recovery.replica_every cannot use {memory} ({error.strerror}); set replica_every=None to recover "
                "from the disk"
            ) from None
        return cls(path)

    def env(self, node: int = 0) -> dict[str, str]:
        """Return the environment variable for the ranks of a node, whose folder is created."""
        from shardscope.training.checkpoint.memory import VARIABLE, node_folder

        folder = node_folder(self.path, node)
        folder.mkdir(mode=0o700, exist_ok=True)
        return {VARIABLE: str(folder)}

    def newest_step(self) -> int | None:
        """Return the newest step that can be restored; None if there is none."""
        from shardscope.training.checkpoint.memory import held_in, newest_whole

        newest = newest_whole(held_in(folder) for folder in sorted(self.path.iterdir()))
        return None if newest is None else newest.step

    def save_to(self, folder: Path, *, keep: int) -> None:
        """Write the newest copy on this machine to a folder of checkpoints, unless its newest checkpoint is as new.

        Args:
            folder: Folder of the run's checkpoints.
            keep: Number of checkpoints to keep in the folder.

        Raises:
            CheckpointError: The copy cannot be written.
        """
        from shardscope.training.checkpoint.folders import complete_checkpoints, step_of
        from shardscope.training.checkpoint.memory import held_in, newest_whole, node_folder
        from shardscope.training.checkpoint.writing import copy_to_disk

        here = node_folder(self.path, 0)
        newest = newest_whole([held_in(here)])
        saved = max(map(step_of, complete_checkpoints(folder)), default=0)
        if newest is not None and newest.step > saved:
            copy_to_disk(here / f"step-{newest.step}", folder, keep)

    def lose(self, node: int) -> None:
        """Empty the folder of a node that has failed, as if its memory were gone."""
        from shardscope.training.checkpoint.memory import node_folder

        folder = node_folder(self.path, node)
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(mode=0o700, exist_ok=True)

    def remove(self) -> None:
        """Remove all copies."""
        shutil.rmtree(self.path, ignore_errors=True)


def keep_newest(run: RunDir, memory: ReplicaMemory, ending: Ending) -> Ending:
    """Write the newest copy of an elastic run that ends early to its checkpoints, so that it can be resumed.

    A resize leaves the state only in memory. Elastic runs are on one machine, so all of it is in one folder.

    Returns:
        The ending, with the reason if the copy is lost.
    """
    try:
        job = run.read_job()
        if job.elastic is not None:
            memory.save_to(run.path.absolute() / "checkpoints", keep=job.checkpoint.keep)
    except (OSError, ShardscopeError) as error:  # such as a full disk, or a directory that has been deleted
        lost = f"its newest copy in memory is lost: {error}"
        print(lost, file=sys.stderr)
        if ending.error is None:
            return replace(ending, reason=f"{ending.reason}; {lost}")
        return replace(ending, error={**ending.error, "message": f"{ending.error['message']}; {lost}"})
    return ending


def remove_leftovers(memory: Path = _MEMORY) -> None:
    """Remove the folders that ended agents of this pid namespace have left."""
    namespace = _namespace()
    for path in memory.glob("shardscope-replicas-*"):
        with contextlib.suppress(OSError):
            found = _NAME.fullmatch(path.name)
            if found is None or path.lstat().st_uid != os.getuid() or path.is_symlink():
                continue
            if int(found[1]) == namespace and not is_alive(int(found[2]), f"{found[3]}/{found[4]}"):
                shutil.rmtree(path, ignore_errors=True)


def _name(pid: int, started: str) -> str:
    return f"shardscope-replicas-{_namespace()}-{pid}-{started.replace('/', '-')}"


def _namespace() -> int:
    """Return the number of this process's pid namespace: containers may share the memory, but not their pids."""
    try:
        return Path("/proc/self/ns/pid").stat().st_ino
    except OSError:
        return 0
