"""A cache of shards on local disk: shared by the ranks of a machine, limited in size, and kept between runs.

    get(name, make)     a memory-mapped shard, and whether it was cached; if not, `make` creates it

Each shard is one ``.npy`` file. It is written under another name and then renamed, while a lock for that shard makes
other ranks wait rather than fetch it too. The operating system releases the locks of a killed process. A hit updates
the file's modification time, by which the least recently used shards are found. A shard that is deleted while a rank
still maps it stays readable there.
"""

from __future__ import annotations

import os
import time
import weakref
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO, NamedTuple

from shardscope.disk_cache import require_private
from shardscope.errors import DataError
from shardscope.spec.units import bytes_text
from shardscope.storage import caches
from shardscope.storage.formats import Array, loaded
from shardscope.storage.locks import locked


class Got(NamedTuple):
    """A shard from the cache, and whether it was cached already."""

    rows: Array
    was_there: bool


class ShardCache:
    """Cache of the shards of one data set.

    Args:
        folder: Folder of the cache; it is created, readable only by its owner.
        most_bytes: Limit of the total size of complete shards, in bytes. Shards that are being written do not count.
        source: Path of the data set.
        needed: Size of all shards of the data set, in bytes; None to assume `most_bytes`.

    Raises:
        DataError: Another user can write to the folder, it cannot be created, or all caches together would be larger
            than their limit.
    """

    def __init__(
        self, folder: Path, most_bytes: float, source: str = "", needed: float | None = None
    ) -> None:
        self.folder, self.most_bytes = folder, most_bytes
        make_private(folder)
        grows_to = most_bytes if needed is None else min(most_bytes, needed)
        weakref.finalize(self, os.close, caches.use(folder, source, grows_to))

    def get(self, name: str, make: Callable[[BinaryIO], object]) -> Got:
        """Return a shard; if it is not in the cache or is damaged, `make` writes it to a binary file as ``.npy``.

        Raises:
            DataError: The shard cannot be written, or is larger than the cache.
        """
        path = self.folder / f"{name}.npy"
        rows = _mapped(path)
        if rows is None:
            with locked(self.folder / f"{name}.lock"):
                rows = _mapped(path)
                if rows is None:
                    return Got(self._add(path, make), was_there=False)
        return Got(rows, was_there=True)

    def __len__(self) -> int:
        """Return the number of shards in the cache."""
        return sum(1 for _ in self.folder.glob("*.npy"))

    def _add(self, path: Path, make: Callable[[BinaryIO], object]) -> Array:
        part = path.with_suffix(".part")  # of one process at a time, so a killed one leaves at most this file
        try:
            with part.open("wb") as file:
                make(file)
            size = part.stat().st_size
            self._require_fits(size)
            rows = _mapped(part)
            assert rows is not None, "just written"
            with locked(self.folder / caches.ROOM):
                self._make_room(size)
                part.replace(path)
        except OSError as error:
            part.unlink(missing_ok=True)
            raise DataError(
                f"the cache in {str(self.folder)!r} cannot be written ({error.strerror}); free space there, or set "
                "cache_folder to another folder"
            ) from None
        except BaseException:
            part.unlink(missing_ok=True)
            raise
        return rows

    def _require_fits(self, num_bytes: int) -> None:
        if num_bytes > self.most_bytes:
            raise DataError(
                f"cache={bytes_text(self.most_bytes)} is smaller than a shard of {bytes_text(num_bytes)}; use at least "
                f"{bytes_text(2 * num_bytes)}"
            )

    def _make_room(self, num_bytes: int) -> None:
        """Delete the least recently used shards until `num_bytes` more fit; the caller holds the room lock."""
        found = []
        for path in self.folder.glob("*.npy"):
            status = path.stat()
            found.append((status.st_mtime_ns, status.st_size, path))
        total = num_bytes + sum(size for _, size, _ in found)
        for _, size, path in sorted(found):
            if total <= self.most_bytes:
                break
            path.unlink(missing_ok=True)
            total -= size


def make_private(folder: Path) -> None:
    """Create a folder and its missing parents, readable only by their owner; check a folder that exists.

    Raises:
        DataError: Another user can write to the folder, or it cannot be created.
    """
    require_private(folder, setting="cache_folder")
    try:
        for each in reversed([folder, *folder.parents]):
            if not each.exists():  # `parents=True` would create those above as the umask says
                each.mkdir(mode=0o700, exist_ok=True)
    except OSError as error:
        raise DataError(
            f"the cache folder {str(folder)!r} cannot be created ({error.strerror}); set cache_folder to another"
        ) from None


def _mapped(path: Path) -> Array | None:
    """Memory-map a shard and mark it as used; return None if it is missing, or damaged and therefore deleted."""
    try:
        rows: Array = loaded(path, is_mapped=True)
    except OSError:
        return None
    except (ValueError, EOFError):  # left behind by a machine that lost power
        path.unlink(missing_ok=True)
        return None
    with suppress(OSError):  # deleted by another rank since; the mapping stays valid
        os.utime(path, ns=(time.time_ns(),) * 2)  # finer than the clock that the system would take
    return rows
