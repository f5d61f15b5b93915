"""What a checkpoint on disk holds, and writers of checkpoints that take their time."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from shardscope.training.checkpoint.index import read_index, verify
from shardscope.training.checkpoint.pieces import CheckpointReader
from shardscope.training.checkpoint.writing import CheckpointPart


def contents(path: Path) -> dict[str, Any]:
    """All tensors and values of an undamaged checkpoint."""
    index = read_index(path)
    verify(path, index, index.files)
    reader = CheckpointReader(path, index)
    tensors = {key: reader.zeros(key) for key in index.tensors}
    return {**reader.fill(tensors), **index.values}


def differing(one: dict[str, Any], other: dict[str, Any]) -> set[str]:
    """Names of the entries that two checkpoints do not have in common, bit for bit."""
    return {key for key in one.keys() | other.keys() if not _same(one.get(key), other.get(key))}


def _same(one: Any, other: Any) -> bool:
    return torch.equal(one, other) if isinstance(one, torch.Tensor) else one == other


@contextmanager
def slow_writers(seconds: float) -> Iterator[None]:
    """Let each rank take this long before it writes its part."""
    write = CheckpointPart.write

    def slowly(part: CheckpointPart) -> Any:
        time.sleep(seconds)
        return write(part)

    CheckpointPart.write = slowly  # type: ignore[method-assign]
    try:
        yield
    finally:
        CheckpointPart.write = write  # type: ignore[method-assign]
