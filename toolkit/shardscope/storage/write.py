"""Write a data set as shards: ``.npy`` files that are memory-mapped when they are read."""

from __future__ import annotations

import secrets
import shutil
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from shardscope.errors import DataError, quoted
from shardscope.spec.shards import Shards
from shardscope.spec.units import positive, quantity
from shardscope.storage.formats import Array


def write_shards(folder: str | Path, data: Any, *, shard_size: float | str = "16 MB") -> Shards:
    """Write data into a folder of shards, for ``Job(data=...)``.

    The folder appears under its name only when it is complete. At most two shards of data are in memory at a time, so a
    generator can write more data than fits in memory. Rows should be in random order if the source of the data is
    sorted: training shuffles rows only within a few shards at a time.

    Args:
        folder: The folder to create; it may exist if it is empty.
        data: A pair ``(x, y)`` of arrays with one input and one target per row; a one-dimensional array of integer
            tokens; or an iterable, such as a generator, of such pairs or arrays.
        shard_size: Size of a shard, in bytes or with a unit.

    Returns:
        The shards, as a value for the field `data` of a job; `replace` adds a cache.

    Example:
        >>> import numpy as np
        >>> shards = ss.write_shards("shards", (np.zeros((100, 8), "float32"), np.arange(100)))  # doctest: +SKIP
        >>> ss.Job(model="mlp", data=shards.replace(cache="1 GB"))  # doctest: +SKIP

    Raises:
        DataError: The folder is not empty, the data has no rows, or its rows differ in shape or type.
        SpecError: `shard_size` is not a size.
    """
    target = Path(folder).expanduser().absolute()
    most_bytes = positive(
        quantity(shard_size, "bytes", field="shard_size"), field="shard_size", given=shard_size
    )
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise DataError(f"folder={str(target)!r} exists and is not empty; give a new folder")
    target.parent.mkdir(parents=True, exist_ok=True)
    part = target.parent / f".{target.name}-{secrets.token_hex(8)}"
    part.mkdir()  # with the permissions of the user's umask, which `mkdtemp` would narrow
    try:
        for number, rows in enumerate(_shards(_chunks(data), most_bytes)):
            np.save(part / f"shard-{number:06d}.npy", rows, allow_pickle=False)
        part.replace(target)
    except BaseException:
        shutil.rmtree(part, ignore_errors=True)
        raise
    return Shards(path=str(target))


def _chunks(data: Any) -> Iterator[Array]:
    """Yield the rows of the data in parts, as structured arrays or as tokens."""
    if isinstance(data, tuple) or hasattr(data, "dtype"):
        data = [data]
    if not isinstance(data, Iterable):
        raise DataError(
            f"data={quoted(data)} cannot be written; give (x, y), an array of tokens, or an iterable of them"
        )
    first = None
    for chunk in data:
        rows = _rows(chunk)
        first = rows.dtype if first is None else first
        if rows.dtype != first:
            raise DataError(
                f"rows of type {rows.dtype} follow rows of type {first}; give rows of equal shape and type"
            )
        yield rows


def _rows(chunk: Any) -> Array:
    if isinstance(chunk, tuple | list) and len(chunk) == 2 and not np.isscalar(chunk[0]):
        x, y = map(np.asarray, chunk)
        numbers = x.dtype.kind in "biuf" and y.dtype.kind in "biuf"
        if not numbers or not x.ndim or not y.ndim or len(x) != len(y):
            raise DataError(
                f"x has shape {x.shape} and type {x.dtype}, y has shape {y.shape} and type {y.dtype}; "
                "give arrays of numbers, with one target for each input"
            )
        rows = np.empty(len(x), dtype=[("x", x.dtype, x.shape[1:]), ("y", y.dtype, y.shape[1:])])
        rows["x"], rows["y"] = x, y
        return rows
    tokens = np.asarray(chunk)
    if tokens.ndim != 1 or tokens.dtype.kind not in "iu":
        raise DataError(
            f"data has a part of shape {tokens.shape} and type {tokens.dtype}; "
            "give pairs (x, y), or one-dimensional arrays of integer tokens"
        )
    return tokens


def _shards(chunks: Iterable[Array], most_bytes: float) -> Iterator[Array]:
    """Yield arrays of `most_bytes`, of which the last may be smaller, from parts of any size."""
    waiting: list[Array] = []
    held = written = 0
    for chunk in chunks:
        per_shard = max(1, int(most_bytes // chunk.dtype.itemsize))
        start = 0
        while start < len(chunk):
            taken = chunk[start : start + per_shard - held]
            waiting.append(taken)
            held, start = held + len(taken), start + len(taken)
            if held == per_shard:
                yield np.concatenate(waiting)
                waiting, held, written = [], 0, written + held
    if held:
        yield np.concatenate(waiting)
    elif not written:
        raise DataError("data has no rows; give at least one row")
