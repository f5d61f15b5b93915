"""On-disk cache of parsed data sets and of traces: each is created once per machine and user, then read.

A file is written under a temporary name in the same folder, then renamed. So several ranks may write it at the same
time, and no reader sees an incomplete file. Reading never unpickles.
"""

from __future__ import annotations

import os
import stat
import tempfile
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from shardscope._version import __version__
from shardscope.errors import DataError

if TYPE_CHECKING:
    import numpy as np

T = TypeVar("T")
LIMIT = "SHARDSCOPE_CACHE_LIMIT"
"""Environment variable that limits the total size of all data-set caches in a folder; no limit if it is unset. See
`shardscope.storage.caches`."""


def cached_array(name: str, make: Callable[[], np.ndarray[Any, Any]]) -> np.ndarray[Any, Any]:
    """Return the array `name` from the cache, memory-mapped and read-only; if it is missing, call `make` to create it.

    Raises:
        DataError: Other users can write to the cache directory, so its contents cannot be trusted.
    """
    import numpy as np

    return cached(
        f"{name}.npy",
        make,
        read=lambda path: np.load(path, mmap_mode="r", allow_pickle=False),
        write=lambda file, array: np.save(file, array, allow_pickle=False),
    )


def cached(
    name: str,
    make: Callable[[], T],
    *,
    read: Callable[[Path], T],
    write: Callable[[Any, T], object],
    keep: int | None = None,
) -> T:
    """Return the content of a cache file; if the file is missing or corrupt, call `make` and store its result.

    If the cache cannot be written, the result of `make` is returned without being stored.

    Args:
        name: Name of the file.
        make: Function that creates the value.
        read: Function that reads the value from a path, and raises `ValueError` if the file is corrupt.
        write: Function that writes the value to an open binary file.
        keep: Maximum number of files whose names start with the part of `name` before its first hyphen; the oldest are
            deleted. None for no limit.

    Raises:
        DataError: Other users can write to the cache directory, so its contents cannot be trusted.
    """
    path = cache_dir() / name
    with suppress(OSError, ValueError, EOFError):
        return read(path)
    made = make()
    try:
        store(path, lambda file: write(file, made), keep=keep)
        return read(path)
    except OSError:
        return made


def cache_dir() -> Path:
    """Return the cache directory: ``$SHARDSCOPE_CACHE`` or else ``~/.cache/shardscope``; it may not exist yet.

    Raises:
        DataError: Another user owns the directory or can write to it.
    """
    path = Path(os.environ.get("SHARDSCOPE_CACHE") or Path.home() / ".cache" / "shardscope").expanduser()
    require_private(path, setting="SHARDSCOPE_CACHE")
    return path


def require_private(path: Path, *, setting: str) -> None:
    """Check that only this user can write to a cache directory, if it exists.

    Args:
        path: The cache directory.
        setting: Environment variable that selects the directory, for the error message.

    Raises:
        DataError: Another user owns the directory or can write to it.
    """
    if path.exists() and not _is_private(path.stat()):
        raise DataError(
            f"the cache directory {str(path)!r} can be written by other users; "
            f"set {setting} to a directory that only you can write"
        )


def store(path: Path, write: Callable[[Any], object], *, keep: int | None = None) -> None:
    """Write a cache file atomically: `write` fills a temporary file, which is then renamed to `path`.

    At most `keep` files of its kind remain; see `cached`.

    Raises:
        OSError: The file cannot be written.
    """
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile(dir=path.parent, prefix=f".{path.stem}-", delete=False) as file:
        try:
            write(file)
            file.flush()
            Path(file.name).replace(path)
        except BaseException:
            Path(file.name).unlink(missing_ok=True)
            raise
    if keep is not None:
        _thin_out(path, keep)


@cache
def source_state(*folders: str) -> tuple[str, int]:
    """Return Shardscope's version, and the time of the last change to the source in these folders of the package."""
    sources = [path for folder in folders for path in Path(__file__).parent.joinpath(folder).rglob("*.py")]
    return __version__, max(path.stat().st_mtime_ns for path in sources)


def _is_private(status: os.stat_result) -> bool:
    return status.st_uid == os.getuid() and not status.st_mode & (stat.S_IWGRP | stat.S_IWOTH)


def _thin_out(path: Path, keep: int) -> None:
    alike = list(path.parent.glob(f"{path.name.partition('-')[0]}-*"))
    for old in sorted(alike, key=lambda file: file.stat().st_mtime_ns)[:-keep]:
        old.unlink(missing_ok=True)
