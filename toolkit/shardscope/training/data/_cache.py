"""On-disk cache of arrays, such as parsed data sets: created once per machine, then read memory-mapped.

A file is written under a temporary name in the same folder, then renamed. So several ranks may write it at the same
time, and no reader sees an incomplete file. Reading never unpickles.
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
    """Return the array `name` from the cache; if its file is missing or damaged, call `make` and store the result.

    If the cache cannot be written, the array from `make` is returned without being stored.

    Raises:
        DataError: Other users can write to the cache directory, so its contents cannot be trusted.
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
    """Return the cache directory: ``$SHARDSCOPE_CACHE`` or else ``~/.cache/shardscope``; it may not exist yet.

    Raises:
        DataError: Another user owns the directory or can write to it.
    """
    path = Path(os.environ.get("SHARDSCOPE_CACHE") or Path.home() / ".cache" / "shardscope").expanduser()
    if path.exists() and not _is_private(path.stat()):
        raise DataError(
            f"the cache directory {str(path)!r} can be written by other users; "
            "set SHARDSCOPE_CACHE to a directory that only you can write"
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
