"""Names of checkpoint folders: ``step-N`` for a complete checkpoint, any other name for an incomplete one."""

from __future__ import annotations

import re
from pathlib import Path

_COMPLETE = re.compile(r"step-(\d{1,18})")


def is_checkpoint(path: Path) -> bool:
    """Return whether a path has the name of a complete checkpoint."""
    return _COMPLETE.fullmatch(path.name) is not None


def step_of(path: Path) -> int:
    """Return the step after which a checkpoint was saved."""
    return int(path.name.removeprefix("step-"))


def complete_checkpoints(folder: Path) -> list[Path]:
    """Return the complete checkpoints in `folder`, oldest first; empty if the folder does not exist."""
    if not folder.is_dir():
        return []
    return sorted(filter(is_checkpoint, folder.iterdir()), key=step_of)
