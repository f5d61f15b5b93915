"""The folders of a run's checkpoints: ``step-N`` is complete; no other name is a complete checkpoint."""

from __future__ import annotations

import re
from pathlib import Path

_COMPLETE = re.compile(r"step-(\d{1,18})")


def is_checkpoint(path: Path) -> bool:
    """Whether a path has the name of a complete checkpoint."""
    return _COMPLETE.fullmatch(path.name) is not None


def step_of(path: Path) -> int:
    """The step after which a checkpoint was saved."""
    return int(path.name.removeprefix("step-"))


def complete_checkpoints(folder: Path) -> list[Path]:
    """The checkpoints in `folder`, oldest first."""
    if not folder.is_dir():
        return []
    return sorted(filter(is_checkpoint, folder.iterdir()), key=step_of)
