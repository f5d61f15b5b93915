"""Checkpoint folders of a run: a complete checkpoint is named ``step-N``, an incomplete one never is."""

from __future__ import annotations

import re
from pathlib import Path

_COMPLETE = re.compile(r"step-(\d{1,18})")


def is_checkpoint(path: Path) -> bool:
    """Whether a path is named like a complete checkpoint."""
    return _COMPLETE.fullmatch(path.name) is not None


def step_of(path: Path) -> int:
    """Return the step after which a checkpoint was saved."""
    return int(path.name.removeprefix("step-"))


def complete_checkpoints(folder: Path) -> list[Path]:
    """Return the complete checkpoints in `folder`, oldest first; empty if the folder does not exist."""
    if not folder.is_dir():
        return []
    return sorted(filter(is_checkpoint, folder.iterdir()), key=step_of)
