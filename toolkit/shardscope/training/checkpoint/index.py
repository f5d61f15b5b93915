"""The index of a checkpoint, a JSON file with its values and the locations of its tensors.

    step-N/
        index.json      the values, and the location of each tensor's pieces; written last, with its own checksum
        rank-R.bin      the bytes of the tensor pieces that rank R wrote, one after another
        rank-R-step-M.bin   in incremental checkpoints: pieces that have not changed since step M; see `unchanged`

Every entry of an index is validated before use: file names cannot point outside the folder, and no piece extends beyond
its file.
"""

from __future__ import annotations

import json
import math
import os
import stat
import sys
import zlib
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any, BinaryIO, Literal

import torch
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from shardscope.errors import CheckpointError

FILE = "index.json"
_MOST_INDEX_BYTES = 2**30
_CHUNK_BYTES = 2**24
"""Number of bytes read and checksummed at a time."""

Count = Annotated[int, Field(ge=0, le=2**62)]
Shape = Annotated[tuple[Count, ...], Field(max_length=64)]
FileName = Annotated[str, Field(pattern=r"^rank-[0-9]{1,6}(-step-[0-9]{1,18})?\.bin$")]


class Damaged(CheckpointError):
    """Error for a checkpoint with missing or modified data; an older checkpoint may be intact."""


class _Strict(BaseModel):
    model_config = ConfigDict(frozen=True, strict=True, extra="forbid")


class StoredBox(_Strict):
    """A rectangular piece of a tensor, stored in row-major order in one of the files.

    Attributes:
        file: Name of the file.
        at: Position of the first byte in the file.
        offsets: Offset of the piece in the whole tensor, in each dimension.
        shape: Shape of the piece.
        checksum: CRC-32 of the bytes.
    """

    file: FileName
    at: Count
    offsets: Shape
    shape: Shape
    checksum: Count


class TensorEntry(_Strict):
    """Index entry for one tensor: its dtype, the shape of the whole tensor, and its pieces."""

    dtype: str
    shape: Shape
    pieces: tuple[StoredBox, ...]

    @property
    def format(self) -> torch.dtype:
        """The dtype of the tensor, as a `torch.dtype`."""
        found = getattr(torch, self.dtype, None)
        if not isinstance(found, torch.dtype):
            raise Damaged(f"{FILE} has an unknown dtype {self.dtype[:40]!r}")
        return found

    def num_bytes(self, piece: StoredBox) -> int:
        """Return the size of one of the tensor's pieces, in bytes."""
        return math.prod(piece.shape) * self.format.itemsize


class Index(_Strict):
    """Index of a checkpoint; tensors and values have the names that `torch.distributed.checkpoint` gives them."""

    kind: Literal["shardscope-checkpoint"] = "shardscope-checkpoint"
    version: Literal[1] = 1
    byteorder: Literal["little", "big"]
    tensors: dict[str, TensorEntry]
    values: dict[str, Any]
    files: dict[FileName, Count]


def index_of(tensors: dict[str, Any], values: dict[str, Any], files: dict[str, int]) -> dict[str, Any]:
    """Return an index with its checksum, in JSON-serializable types.

    Args:
        tensors: The entries of tensors, by name.
        values: The values that are not tensors, by name.
        files: The size of each file in bytes.
    """
    content = {
        "kind": "shardscope-checkpoint", "version": 1, "byteorder": sys.byteorder,
        "tensors": tensors, "values": values, "files": files,
    }  # fmt: skip
    return {"checksum": _checksum(content), "content": content}


def read_index(folder: Path) -> Index:
    """Read the index of the checkpoint in `folder`, and validate that all its entries are within bounds.

    Raises:
        Damaged: The index is missing, unreadable or invalid, or was modified after it was written.
        CheckpointError: The checkpoint was written on a machine with a different byte order.
    """
    text = _read_small(folder / FILE)
    try:
        whole = json.loads(text)
        content = whole["content"]
        if _checksum(content) != whole["checksum"]:
            raise Damaged(f"{FILE} was modified after it was written: its checksum does not match")
        index = Index.model_validate_json(json.dumps(content))
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part)[:80] for part in first["loc"])
        raise Damaged(f"{FILE} has an invalid entry {where!r} ({first['msg']})") from None
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        if isinstance(error, Damaged):
            raise
        raise Damaged(f"{FILE} is not the index of a checkpoint ({type(error).__name__})") from None
    if index.byteorder != sys.byteorder:
        raise CheckpointError(
            f"{folder} was written on a {index.byteorder}-endian machine; "
            "resume it on a machine with the same byte order"
        )
    _check_files(folder, index)
    _check_pieces(index)
    return index


def verify(folder: Path, index: Index, files: Iterable[str]) -> None:
    """Read all pieces in `files`, and compare their checksums with those in the index.

    Raises:
        Damaged: A checksum differs.
    """
    wanted = set(files)
    for key, stored in index.tensors.items():
        for piece in stored.pieces:
            if piece.file not in wanted:
                continue
            with open_plain(folder / piece.file) as file:
                if _sum_of(file, piece.at, stored.num_bytes(piece)) != piece.checksum:
                    raise Damaged(
                        f"the bytes of {key} in {piece.file} were modified: their checksum does not match"
                    )


def open_plain(path: Path) -> BinaryIO:
    """Open a regular file for reading; fail at once, without blocking, if it is a symbolic link, pipe or device.

    Raises:
        Damaged: The file does not exist, cannot be read, or is not a regular file.
    """
    try:
        file = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except FileNotFoundError:
        raise Damaged(f"{path.name} is missing") from None
    except OSError as error:
        raise Damaged(f"{path.name} cannot be read ({error.strerror})") from None
    if not stat.S_ISREG(os.fstat(file).st_mode):
        os.close(file)
        raise Damaged(f"{path.name} is not a regular file")
    return os.fdopen(file, "rb")


def _read_small(path: Path) -> bytes:
    with open_plain(path) as file:
        size = os.fstat(file.fileno()).st_size
        if not 0 < size <= _MOST_INDEX_BYTES:
            raise Damaged(f"{path.name} has {size:,} bytes; the size must be from 1 to {_MOST_INDEX_BYTES:,}")
        return file.read(size)


def _checksum(content: Any) -> int:
    return zlib.crc32(json.dumps(content, sort_keys=True, separators=(",", ":"), allow_nan=False).encode())


def _sum_of(file: BinaryIO, at: int, size: int) -> int:
    file.seek(at)
    total = 0
    while size > 0:
        part = file.read(min(size, _CHUNK_BYTES))
        if not part:
            return -1
        total, size = zlib.crc32(part, total), size - len(part)
    return total


def _check_files(folder: Path, index: Index) -> None:
    for name, size in index.files.items():
        with open_plain(folder / name) as file:
            found = os.fstat(file.fileno()).st_size
        if found != size:
            raise Damaged(f"{name} has {found:,} bytes instead of {size:,}")


def _check_pieces(index: Index) -> None:
    for key, stored in index.tensors.items():
        for piece in stored.pieces:
            if not _fits(piece, stored) or piece.at + stored.num_bytes(piece) > index.files.get(
                piece.file, -1
            ):
                raise Damaged(f"{FILE} has a piece of {key[:80]} that is out of bounds")
        if sum(math.prod(piece.shape) for piece in stored.pieces) != math.prod(stored.shape):
            raise Damaged(f"{FILE} does not list every element of {key[:80]}")


def _fits(piece: StoredBox, stored: TensorEntry) -> bool:
    box = zip(piece.offsets, piece.shape, stored.shape, strict=False)
    return len(piece.offsets) == len(piece.shape) == len(stored.shape) and all(o + n <= s for o, n, s in box)
