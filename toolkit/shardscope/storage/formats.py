"""Protocol of all shard formats, and `open_shards`, which opens a folder or file in its format.

The rows of a shard are an array, either structured with fields for inputs and targets, or one-dimensional integers,
which are tokens.
"""

from __future__ import annotations

import hashlib
import os
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from shardscope.errors import DataError
from shardscope.spec.shards import Shards

Array = npt.NDArray[Any]
_BLOCKS, _BLOCK_BYTES = 32, 4096
"""Number of blocks, evenly spaced in a file, that are hashed for `ShardInfo.sample`, and bytes per block."""
_PARSING = threading.Lock()
_SUFFIXES = {"npy": (".npy",), "tar": (".tar",), "parquet": (".parquet",), "arrow": (".arrow",)}


class ShardInfo(NamedTuple):
    """One shard.

    Attributes:
        path: File of the shard.
        rows: Number of rows, or of tokens if the shard holds tokens.
        num_bytes: Size of the file, in bytes.
        unpacked_bytes: Size of the rows as an array, as a cache holds them, in bytes.
    """

    path: Path
    rows: int
    num_bytes: int
    unpacked_bytes: int

    @property
    def stamp(self) -> str:
        """Digest of the file's path, size and modification time; changes whenever the file is written."""
        status = self.path.stat()
        told = (str(self.path.resolve()), status.st_size, status.st_mtime_ns)
        return hashlib.sha256(repr(told).encode()).hexdigest()[:16]

    @property
    def sample(self) -> str:
        """Digest of the file's size and of blocks spread over it; does not change if the file is only touched."""
        with self.path.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            digest = hashlib.sha256(str(size).encode())
            for place in range(_BLOCKS):
                file.seek(max(0, size - _BLOCK_BYTES) * place // (_BLOCKS - 1))
                digest.update(file.read(_BLOCK_BYTES))
        return digest.hexdigest()[:16]


class ShardFormat(Protocol):
    """Shards in one format.

    Attributes:
        shards: The shards, ordered by name.
        columns: Names of the columns of inputs and targets in the files.
        fields: Names of the fields of inputs and targets in the arrays.
        is_mapped: Whether `read` maps a file into memory; otherwise it unpacks the whole shard.
        holds_tokens: Whether the shards are one-dimensional arrays of tokens.
    """

    shards: tuple[ShardInfo, ...]
    columns: tuple[str, str]
    fields: tuple[str, str]
    is_mapped: bool
    holds_tokens: bool

    def read(self, index: int) -> Array:
        """Return the rows of a shard.

        Raises:
            DataError: The file is damaged, or does not have the columns.
        """
        ...


def open_shards(spec: Shards, *, path: str | None = None) -> ShardFormat:
    """Open shards in their format.

    Args:
        spec: The shards.
        path: Path to open instead of the path in `spec`, such as ``spec.test``.

    Raises:
        DataError: There are no shards in this format, their rows are of different types, or a package that reads the
            format is not installed.
    """
    where = Path(path or spec.path).expanduser()
    kind, files = _files(where, spec.format)
    names = spec.inputs, spec.targets
    if kind == "npy":
        from shardscope.storage.npy import NpyShards

        return NpyShards(files, names[0] or "x", names[1] or "y")
    if kind == "tar":
        from shardscope.storage.tar import TarShards

        return TarShards(files, names[0] or "x.npy", names[1] or "cls")
    from shardscope.storage.tables import TableShards

    return TableShards(files, names[0] or "x", names[1] or "y", is_parquet=kind == "parquet")


def holds_shards(path: Path) -> bool:
    """Return whether a path is a folder, or a file in one of the formats that are only read as shards."""
    return path.is_dir() or path.suffix.lower() in {".tar", ".parquet", ".arrow"}


def _files(path: Path, kind: str) -> tuple[str, list[Path]]:
    """Return the format of the shards in a path and their files, ordered by name."""
    if not path.exists():
        raise DataError(f"data={str(path)!r} does not exist; give the path of a folder with shards")
    inside = sorted(path.iterdir()) if path.is_dir() else [path]
    by_kind = {
        each: files
        for each, suffixes in _SUFFIXES.items()
        if (files := [file for file in inside if file.suffix.lower() in suffixes and file.is_file()])
    }
    if kind == "auto" and len(by_kind) == 1:
        return next(iter(by_kind.items()))
    if kind in by_kind:
        return kind, by_kind[kind]
    if len(by_kind) > 1 and kind == "auto":
        raise DataError(
            f"data={str(path)!r} has files in several formats ({', '.join(by_kind)}); "
            "choose one with ss.Shards(path, format=...)"
        )
    what = "any shards" if kind == "auto" else f"any .{kind} shards"
    folders = [file.name for file in inside if file.is_dir()][:3]
    hint = f", or one of its folders {', '.join(folders)}" if folders else ""
    raise DataError(
        f"data={str(path)!r} does not have {what}; give a folder of .npy, .tar, .parquet or .arrow files{hint}, "
        "or make one with ss.write_shards"
    )


def loaded(file: Path | IO[bytes], *, is_mapped: bool = False) -> Any:
    """Call `numpy.load` in one thread at a time.

    Python's parser, which reads the headers, shares its recursion depth between threads, so two at once may fail.
    """
    with _PARSING:
        return np.load(file, mmap_mode="r" if is_mapped else None, allow_pickle=False)


def paired(x: Array, y: Array, *, where: str) -> Array:
    """Return inputs and targets as one structured array with the fields ``x`` and ``y``.

    Args:
        x: The inputs, one per row.
        y: The targets, one per row.
        where: The file, for error messages.

    Raises:
        DataError: The values are not numbers, or not of equal length.
    """
    for name, array in (("inputs", x), ("targets", y)):
        if array.dtype.kind not in "biuf":
            raise DataError(
                f"{where}: the {name} have type {array.dtype}; use numbers, or arrays of numbers of equal shape"
            )
    if len(x) != len(y):
        raise DataError(f"{where} has {len(x)} inputs but {len(y)} targets; give one target for each input")
    rows = np.empty(len(x), dtype=[("x", x.dtype, x.shape[1:]), ("y", y.dtype, y.shape[1:])])
    rows["x"], rows["y"] = x, y
    return rows


def require_alike(kinds: Sequence[tuple[Path, object]]) -> None:
    """Check that the rows of all files are of the same type and shape.

    Args:
        kinds: Each file, and the type of its rows.

    Raises:
        DataError: Two files differ.
    """
    first, kind = kinds[0]
    for path, other in kinds:
        if other != kind:
            raise DataError(
                f"{first} has rows of type {kind}, but {path} of type {other}; convert them to one type, or put them "
                "into different folders"
            )


def not_a_column(name: str, known: Sequence[str], *, where: str) -> DataError:
    """Return the error for a column that a file does not have."""
    found = ", ".join(known) or "none"
    return DataError(
        f"{where} does not have {name!r}, only {found}; choose with ss.Shards(path, inputs=..., targets=...)"
    )
