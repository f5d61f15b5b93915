"""The caches of data sets in one folder: lists them, detects which are in use, and limits their total size.

    ab12cd34…/              one data set: its shards (see `cache`), and
        about.json          which data set it is
        in-use.lock         locked by each process that reads from the cache; the system releases it if one is killed
    caches.lock             locked while a cache is opened, or caches are deleted

A cache in use is never deleted. Of the other caches, the least recently used are deleted first.
"""

from __future__ import annotations

import fcntl
import json
import os
import re
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from typing import NamedTuple

from shardscope.disk_cache import LIMIT, cache_dir
from shardscope.errors import DataError
from shardscope.spec.units import bytes_text, plural, quantity
from shardscope.storage.locks import locked

_ABOUT, _IN_USE, _ALL = "about.json", "in-use.lock", "caches.lock"
_NAME = re.compile(r"[0-9a-f]{16}")
ROOM = "room.lock"
"""Lock file in a cache's folder; held while shards are deleted and one is added, so that the limit always holds."""
_SHARD, _PART = "*.npy", "*.part"
_OWN = (_SHARD, _PART, "*.lock", _ABOUT)


class DataCache(NamedTuple):
    """The cache of one data set.

    Attributes:
        folder: Folder of the cache.
        source: Path of the data set; empty if an earlier version of Shardscope made the cache.
        num_bytes: Size of the shards in bytes, including any that a killed process left incomplete; for a cache in use,
            the size to which it may grow.
        used_t: Time of the last use, in Unix seconds.
        is_in_use: Whether a process reads from the cache.
    """

    folder: Path
    source: str
    num_bytes: int
    used_t: float
    is_in_use: bool

    @property
    def label(self) -> str:
        """The data set and the size of the cache, for messages."""
        return f"{self.source or self.folder.name} ({bytes_text(self.num_bytes)})"


def default_root() -> Path:
    """Return the folder of the caches of jobs that do not set `cache_folder`."""
    return cache_dir() / "shards"


def limit_here() -> float | None:
    """Return the size limit of all caches in a folder together, in bytes; None if there is none.

    Raises:
        SpecError: The environment variable is not a size.
    """
    text = os.environ.get(LIMIT)
    return quantity(text, "bytes", field=LIMIT) if text else None


def caches_in(root: Path) -> list[DataCache]:
    """Return the caches in a folder, the least recently used first."""
    lock = root / _ALL
    with locked(lock) if lock.exists() else nullcontext():  # a look at a folder writes nothing there
        return _found_in(root)


def use(folder: Path, source: str, needed: float) -> int:
    """Open the cache of a data set, after making room for it.

    The cache is in use until the returned file descriptor is closed, at the latest when the process ends.

    Args:
        folder: Folder of the cache; its parent must exist.
        source: Path of the data set.
        needed: Size to which the cache may grow, in bytes.

    Raises:
        DataError: The caches in use and this one would together exceed the size limit of all caches.
    """
    with locked(folder.parent / _ALL):
        limit = limit_here()
        with _unused(folder) as is_unused:
            if not is_unused:  # those that use it may still fill the size that they stated
                needed = max(needed, _about(folder)[1])
        if limit is not None:
            try:
                _make_room(folder, needed, limit)
            except DataError:
                with suppress(OSError):
                    folder.rmdir()  # if it is new
                raise
        folder.mkdir(mode=0o700, exist_ok=True)
        part = folder / "about.json.part"
        part.write_text(json.dumps({"source": source, "needed": round(needed)}))
        part.replace(folder / _ABOUT)
        file = os.open(folder / _IN_USE, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        fcntl.flock(file, fcntl.LOCK_SH)
        os.utime(file, ns=(time.time_ns(),) * 2)
    return file


def evict(root: Path, most_bytes: float | None) -> list[DataCache]:
    """Delete caches that are not in use until the total size is at most `most_bytes`; return the deleted caches.

    Args:
        root: Folder of the caches.
        most_bytes: Limit of the total size, in bytes; None to delete all caches that are not in use.
    """
    if not root.is_dir():
        return []
    with locked(root / _ALL):
        return _evict(_found_in(root), most_bytes)


def _evict(known: list[DataCache], most_bytes: float | None) -> list[DataCache]:
    total, deleted = sum(cache.num_bytes for cache in known), []
    for cache in known:
        if most_bytes is not None and total <= most_bytes:
            break
        with _unused(cache.folder) as is_unused:
            if is_unused:
                _delete(cache.folder)
                deleted.append(cache)
                total -= cache.num_bytes
    return deleted


def _make_room(folder: Path, needed: float, limit: float) -> None:
    """Delete caches of other data sets until this one fits; the caller holds the lock of all caches."""
    known = [cache for cache in _found_in(folder.parent) if cache.folder != folder]
    left = [cache for cache in known if cache.is_in_use]
    taken = sum(cache.num_bytes for cache in left)
    if taken + needed > limit:
        others = f" beside the {bytes_text(taken)} of {plural(len(left), 'cache')} in use" if left else ""
        raise DataError(
            f"a cache of {bytes_text(needed)} does not fit{others} within {LIMIT}={bytes_text(limit)}; give a smaller "
            f"cache=, or raise {LIMIT}" + (", or wait until the other runs have ended" if left else "")
        )
    deleted = _evict(known, limit - needed)
    if deleted:
        warnings.warn(
            f"deleted the least recently used data {'cache' if len(deleted) == 1 else 'caches'}, of "
            f"{', '.join(cache.label for cache in deleted)}, because all data caches in {folder.parent} "
            f"together are limited to {bytes_text(limit)} ({LIMIT})",
            stacklevel=2,
        )


def _found_in(root: Path) -> list[DataCache]:
    """Return the caches in a folder, least recently used first; the caller holds the lock of all caches."""
    found = []
    with suppress(FileNotFoundError):
        for folder in root.iterdir():
            if _is_cache(folder):
                with suppress(FileNotFoundError):  # deleted by its user in the meantime
                    found.append(_cache_in(folder))
    return sorted(found, key=lambda cache: cache.used_t)


def _is_cache(folder: Path) -> bool:
    """Return whether a folder is a cache folder. Symbolic links are not followed, because they may lead anywhere."""
    return (
        _NAME.fullmatch(folder.name) is not None
        and not folder.is_symlink()
        and any((folder / name).is_file() for name in (_ABOUT, _IN_USE, ROOM))
    )


def _cache_in(folder: Path) -> DataCache:
    shards, parts = _statuses(folder, _SHARD), _statuses(folder, _PART)
    used = _statuses(folder, _IN_USE)
    source, needed = _about(folder)
    with _unused(folder) as is_unused:
        size = sum(status.st_size for status in shards)
        return DataCache(
            folder,
            source,
            size + sum(status.st_size for status in parts) if is_unused else max(size, needed),
            max((status.st_mtime for status in (*used, *shards)), default=folder.stat().st_mtime),
            not is_unused,
        )


def _statuses(folder: Path, pattern: str) -> list[os.stat_result]:
    """Return the status of files that match; skips files that other ranks delete meanwhile."""
    found = []
    for path in folder.glob(pattern):
        with suppress(FileNotFoundError):
            found.append(path.stat())
    return found


def _about(folder: Path) -> tuple[str, int]:
    """Return the path of a data set, and the size to which its cache may grow; an empty path and 0 if unknown."""
    with suppress(OSError, ValueError):
        about = json.loads((folder / _ABOUT).read_text())
        if isinstance(about, dict):
            needed = about.get("needed")
            return str(about.get("source", "")), needed if isinstance(needed, int) else 0
    return "", 0


@contextmanager
def _unused(folder: Path) -> Iterator[bool]:
    """Hold the lock of a cache if no process uses the cache; yield whether the lock is held."""
    try:
        file = (folder / _IN_USE).open("rb")
    except FileNotFoundError:  # no process of this version has used it
        yield True
        return
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            yield False
            return
        yield True


def _delete(folder: Path) -> None:
    """Delete the files of a cache, and its folder if it contains no other files."""
    for pattern in _OWN:
        for path in folder.glob(pattern):
            path.unlink(missing_ok=True)
    with suppress(OSError):
        folder.rmdir()
