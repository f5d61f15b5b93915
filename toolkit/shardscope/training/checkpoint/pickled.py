"""Checkpoints of earlier versions, pickled by `torch.distributed.checkpoint`: read only if the user allows it.

Reading a pickle can run any code that its author put into it.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor

from shardscope.errors import CheckpointError
from shardscope.training.checkpoint.index import FILE, Damaged

PICKLE = ".metadata"


def is_pickled(path: Path) -> bool:
    """Whether a checkpoint was written by an earlier version."""
    return (path / PICKLE).is_file() and not (path / FILE).exists()


@dataclass(frozen=True)
class PickledReader:
    """The counterpart of `Reader` for a pickled checkpoint."""

    path: Path
    stored: Mapping[str, Any]

    @classmethod
    def open(cls, path: Path, *, allowed: bool) -> Self:
        """Open a checkpoint for reading.

        Raises:
            Damaged: The checkpoint cannot be read.
            CheckpointError: Pickles are not allowed, or another user wrote it.
        """
        if not allowed:
            raise CheckpointError(
                f"checkpoint {path} is of an earlier version and a pickle, which can run code when it is read; if you "
                "trust whoever made it, resume with allow_pickle=True (--allow-pickle)"
            )
        for file in (path, *path.iterdir()):
            owner = file.stat().st_uid
            if owner != os.getuid():
                raise CheckpointError(
                    f"{file} belongs to user {owner}, not to you; only your own pickles are read"
                )
        try:
            metadata = dcp.FileSystemReader(path).read_metadata()
        except Exception as error:
            raise _unreadable(error) from error
        _check_sizes(path, metadata)
        return cls(path, metadata.state_dict_metadata)

    @property
    def keys(self) -> set[str]:
        """Names of all tensors and values in it."""
        return set(self.stored)

    def fill(self, state: Mapping[str, Any]) -> dict[str, Any]:
        """Return the same dictionaries with the checkpoint's values; tensors are filled in place.

        Raises:
            Damaged: The checkpoint cannot be read.
        """
        filled = _copied(state)
        try:
            dcp.load(filled, checkpoint_id=self.path, no_dist=True)
        except (RuntimeError, ValueError, KeyError):
            raise  # the checkpoint does not fit this model
        except (Exception, dcp.api.CheckpointException) as error:
            raise _unreadable(error) from error
        return filled

    def room(self, key: str) -> Tensor | None:
        """A tensor of zeros like the saved one; None for a value."""
        stored = self.stored[key]
        is_tensor = isinstance(stored, dcp.metadata.TensorStorageMetadata)
        return torch.zeros(stored.size, dtype=stored.properties.dtype) if is_tensor else None


def _check_sizes(path: Path, metadata: dcp.metadata.Metadata) -> None:
    for piece in (metadata.storage_data or {}).values():
        if piece.offset + piece.length > (path / piece.relative_path).stat().st_size:
            raise Damaged(f"{piece.relative_path} is cut off")


def _copied(state: Mapping[str, Any]) -> dict[str, Any]:
    return {key: _copied(value) if isinstance(value, Mapping) else value for key, value in state.items()}


def _unreadable(error: BaseException) -> Damaged:
    return Damaged((str(error).strip() or type(error).__name__).splitlines()[-1])
