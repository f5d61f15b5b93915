"""Arrays made once for each machine, then read memory-mapped.

Files are written to a temporary name in the same folder and moved into place, so any number of ranks may do it at
once and a reader never sees half a file. Reading never unpickles.
"""

from __future__ import annotations

import os
import stat
import tempfile
from collections.abc import Callable
from pathlib import Path

import numpy as np

from shardscope.errors import DataError
from shardscope.training.data.sources import Array


def cached(name: str, make: Callable[[], Array]) -> Array:
    """Return the array called `name` from the cache; `make` creates it if it is missing or damaged.

    It is not an error if the cache cannot be written: each process then makes the array itself.

    Raises:
        DataError: Other users could have put anything into the cache directory.
    """
    path = cache_dir() / f"{name}.npy"
    try:
        return _read(path)
    except (OSError, ValueError, EOFError):
        array = make()
    try:
        _write(path, array)
        return _read(path)
    except OSError:
        return array


def cache_dir() -> Path:
    """The cache directory: `$SHARDSCOPE_CACHE`, else `~/.cache/shardscope`; it need not exist yet.

    Raises:
        DataError: Another user owns the directory or may write to it.
    """
    path = Path(os.environ.get("SHARDSCOPE_CACHE") or Path.home() / ".cache" / "shardscope").expanduser()
    if path.exists() and not _is_private(path.stat()):
        raise DataError(
            f"cache {str(path)!r} can be written by other users; "
            "set SHARDSCOPE_CACHE to a directory of your own"
        )
    return path


def _is_private(status: os.stat_result) -> bool:
    return status.st_uid == os.getuid() and not status.st_mode & (stat.S_IWGRP | stat.S_IWOTH)


def _read(path: Path) -> Array:
    array: Array = np.load(path, mmap_mode="r", allow_pickle=False)
    return array


def _write(path: Path, array: Array) -> None:
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile(dir=path.parent, prefix=f".{path.stem}-", delete=False) as file:
        try:
            np.save(file, array, allow_pickle=False)
            file.flush()
            Path(file.name).replace(path)
        except BaseException:
            Path(file.name).unlink(missing_ok=True)
            raise
