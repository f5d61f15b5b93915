"""Copies of the ranks' state in host memory: where they are, and which step can be restored from them.

    /dev/shm/shardscope-replicas-.../        created by the agent of a run; outlives the ranks
        node-0/step-N/                       the files in the memory of one node
            index.json                       the index of the whole checkpoint
            rank-R.bin                       the pieces of this node's ranks and of the previous node's

On one machine, a folder ``step-N`` is a complete checkpoint. On several nodes, each node has the files of its own ranks
and of the ranks of the previous node, so the files of a lost node are still in the memory of the next node.
"""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from shardscope.training.checkpoint.folders import complete_checkpoints, step_of
from shardscope.training.checkpoint.index import FILE

VARIABLE = "SHARDSCOPE_REPLICAS"
"""Environment variable with the path of the folder of a rank's node."""


class HeldStep(NamedTuple):
    """The part of one step's copies that a node has in its memory."""

    step: int
    checksum: int
    """Checksum of the index, which is the same on all nodes."""
    files: frozenset[str]
    """Names of the files that the node has."""
    wanted: frozenset[str]
    """Names of all files of the checkpoint."""


def folder_here() -> Path | None:
    """Return the folder in the memory of this rank's node; None if the run keeps no copies there."""
    path = os.environ.get(VARIABLE)
    return None if path is None else Path(path)


def node_folder(memory: Path, node: int) -> Path:
    """Return the folder of a node."""
    return memory / f"node-{node}"


def held_in(folder: Path) -> list[HeldStep]:
    """Return the steps that a node has in its memory, oldest first; damaged folders are left out."""
    return [held for path in complete_checkpoints(folder) if (held := _held(path)) is not None]


def _held(path: Path) -> HeldStep | None:
    try:
        text = (path / FILE).read_bytes()
        wanted = frozenset(json.loads(text)["content"]["files"])
    except (OSError, ValueError, KeyError, TypeError):
        return None
    files = frozenset(name for name in wanted if (path / name).is_file())
    return HeldStep(step_of(path), zlib.crc32(text), files, wanted)


def newest_whole(nodes: Iterable[list[HeldStep]]) -> HeldStep | None:
    """Return the newest step of which the nodes together have all files; None if there is none."""
    found: dict[tuple[int, int], HeldStep] = {}
    for held in nodes:
        for each in held:
            key = each.step, each.checksum
            known = found.get(key, each)
            found[key] = known._replace(files=known.files | each.files)
    whole = [each for each in found.values() if each.files >= each.wanted]
    return max(whole, key=lambda each: each.step, default=None)


def free_bytes(folder: Path) -> int:
    """Return the space left in the file system of a folder, in bytes."""
    found = os.statvfs(folder)
    return found.f_bavail * found.f_frsize


def bytes_before(folder: Path, step: int) -> int:
    """Return the size of the copies of earlier steps in a folder, in bytes."""
    older = [path for path in complete_checkpoints(folder) if step_of(path) < step]
    return sum(file.stat().st_size for path in older for file in path.iterdir())
