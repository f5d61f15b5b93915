"""Shards as ``.npy`` files, memory-mapped in place: the format that `write_shards` writes."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path

import numpy as np

from shardscope.errors import DataError
from shardscope.storage.formats import Array, ShardInfo, loaded, not_a_column, require_alike


class NpyShards:
    """Shards that are structured arrays with a field for each column, or one-dimensional arrays of tokens.

    A file's header contains its dtype and number of rows, so there is no separate index that could disagree with it.
    """

    is_mapped = True

    def __init__(self, files: Sequence[Path], inputs: str, targets: str) -> None:
        self.columns = self.fields = (inputs, targets)
        self.shards = tuple(self._info(path) for path in files)
        self.holds_tokens = _mapped(files[0]).dtype.names is None
        require_alike([(path, self._kind(path)) for path in files])

    def read(self, index: int) -> Array:
        """Return the rows of a shard, memory-mapped."""
        return _mapped(self.shards[index].path)

    def _kind(self, path: Path) -> str:
        rows = _mapped(path)
        if rows.ndim == 1 and rows.dtype.kind in "iu":
            return str(rows.dtype)
        if rows.ndim != 1 or rows.dtype.names is None:
            raise DataError(
                f"{path} has shape {rows.shape} and type {rows.dtype}; shards are one-dimensional, of integer tokens, "
                "or structured with the fields x and y; make them with ss.write_shards"
            )
        for name in self.columns:
            if name not in rows.dtype.names:
                raise not_a_column(name, rows.dtype.names, where=str(path))
        return str(rows.dtype)

    def _info(self, path: Path) -> ShardInfo:
        size = path.stat().st_size
        return ShardInfo(path, len(_mapped(path)), size, size)


def _mapped(path: Path) -> Array:
    try:
        rows = loaded(path, is_mapped=True)
    except Exception as error:  # noqa: BLE001 - NumPy evaluates the header, so damage can raise any error
        raise DataError(
            f"{path} cannot be read as .npy ({(str(error) or type(error).__name__).splitlines()[0]}); "
            "write the shard again"
        ) from None
    if not isinstance(rows, np.memmap):
        raise DataError(
            f"{path} is an .npz archive; save its array with np.save, or make shards with ss.write_shards"
        )
    end, size = rows.offset + rows.nbytes, path.stat().st_size
    if size < end or not _is_padding(path, end):
        raise DataError(
            f"{path} is damaged: it has {size:,} bytes instead of the {end:,} in its header; write the shard again"
        )
    return rows if rows.ndim else rows[None]


def _is_padding(path: Path, end: int) -> bool:
    """Return whether only zeros, a second array, or nothing follows; anything else is rows that the header omits."""
    with path.open("rb") as file:
        file.seek(end)
        first = file.read(len(np.lib.format.MAGIC_PREFIX))
        if first == np.lib.format.MAGIC_PREFIX:
            return True
        return not any(first) and not any(any(block) for block in iter(partial(file.read, 1 << 20), b""))
