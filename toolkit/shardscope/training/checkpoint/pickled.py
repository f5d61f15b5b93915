"""Reads checkpoints of earlier versions, pickled by `torch.distributed.checkpoint`, if the user allows it.

Reading a pickle can run any code that its author has put into it.
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
    """Return whether a checkpoint is a pickle, as written by earlier versions."""
    return (path / PICKLE).is_file() and not (path / FILE).exists()


@dataclass(frozen=True)
class PickledReader:
    """Reads a pickled checkpoint; has the same methods as `CheckpointReader`."""

    path: Path
    stored: Mapping[str, Any]

    @classmethod
    def open(cls, path: Path, *, allowed: bool) -> Self:
        """Open a checkpoint for reading.

        Raises:
            Damaged: The checkpoint cannot be read.
            CheckpointError: `allowed` is false, or a file belongs to another user.
        """
        if not allowed:
            raise CheckpointError(
                f"checkpoint {path} is a pickle from an earlier version, and reading a pickle can run code; if you "
                "trust its author, resume with allow_pickle=True (--allow-pickle)"
            )
        for file in (path, *path.iterdir()):
            owner = file.stat().st_uid
            if owner != os.getuid():
                raise CheckpointError(
                    f"{file} belongs to user {owner}, not to you; only pickles that you own are loaded"
                )
        try:
            metadata = dcp.FileSystemReader(path).read_metadata()
        except Exception as error:
            raise _unreadable(error) from error
        _check_sizes(path, metadata)
        return cls(path, metadata.state_dict_metadata)

    @property
    def keys(self) -> set[str]:
        """Names of all tensors and values in the checkpoint."""
        return set(self.stored)

    def fill(self, state: Mapping[str, Any]) -> dict[str, Any]:
        """Return `state` with its values replaced by those in the checkpoint; tensors are overwritten in place.

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

    def zeros(self, key: str) -> Tensor | None:
        """Return a tensor of zeros with the shape and dtype of the saved tensor `key`; None if it is not a tensor."""
        stored = self.described(key)
        return None if stored is None else torch.zeros(stored[0], dtype=stored[1])

    def described(self, key: str) -> tuple[tuple[int, ...], torch.dtype] | None:
        """Return shape and dtype of the saved tensor `key`; None if it is not a tensor."""
        stored = self.stored.get(key)
        if not isinstance(stored, dcp.metadata.TensorStorageMetadata):
            return None
        return tuple(stored.size), stored.properties.dtype


def _check_sizes(path: Path, metadata: dcp.metadata.Metadata) -> None:
    for piece in (metadata.storage_data or {}).values():
        if piece.offset + piece.length > (path / piece.relative_path).stat().st_size:
            raise Damaged(f"{piece.relative_path} is truncated")


def _copied(state: Mapping[str, Any]) -> dict[str, Any]:
    return {key: _copied(value) if isinstance(value, Mapping) else value for key, value in state.items()}


def _unreadable(error: BaseException) -> Damaged:
    return Damaged((str(error).strip() or type(error).__name__).splitlines()[-1])
