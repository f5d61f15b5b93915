"""Shards as Parquet files, and as the Arrow files of a Hugging Face `Dataset`, read by pyarrow."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from shardscope.errors import DataError
from shardscope.storage.formats import Array, ShardInfo, not_a_column, paired


class TableShards:
    """Shards that are tables with a column of inputs and a column of targets: numbers, or lists of equal length.

    Raises:
        DataError: pyarrow is not installed.
    """

    fields = ("x", "y")
    is_mapped = holds_tokens = False

    def __init__(self, files: Sequence[Path], inputs: str, targets: str, *, is_parquet: bool) -> None:
        self.columns, self._is_parquet = (inputs, targets), is_parquet
        self._arrow = _pyarrow()
        self.shards = tuple(self._info(path) for path in files)

    def read(self, index: int) -> Array:
        """Return the rows of a shard."""
        path = self.shards[index].path
        table = self._table(path)
        x, y = (_array(table.column(name), name, path) for name in self.columns)
        return paired(x, y, where=str(path))

    def _info(self, path: Path) -> ShardInfo:
        try:
            if self._is_parquet:
                with self._arrow.parquet.ParquetFile(path) as file:
                    rows, names = file.metadata.num_rows, file.schema_arrow.names
            else:
                table = self._table(path)
                rows, names = table.num_rows, table.column_names
        except (self._arrow.ArrowException, OSError) as error:
            raise DataError(f"{path} cannot be read as {path.suffix}: {error}") from None
        for name in self.columns:
            if name not in names:
                raise not_a_column(name, names, where=str(path))
        return ShardInfo(path, rows, path.stat().st_size)

    def _table(self, path: Path) -> Any:
        if self._is_parquet:
            return self._arrow.parquet.read_table(path, columns=[*dict.fromkeys(self.columns)])
        return self._arrow.ipc.open_stream(self._arrow.memory_map(str(path))).read_all()


def _pyarrow() -> Any:
    try:
        import pyarrow as pa
        import pyarrow.ipc
        import pyarrow.parquet
    except ImportError as error:
        raise DataError(
            "data in .parquet and .arrow files is read by pyarrow, which is not installed; "
            "run pip install 'shardscope[parquet]'"
        ) from error
    return pa


def _array(column: Any, name: str, path: Path) -> Array:
    """Return a column as an array, with one more dimension for each level of lists."""
    if column.null_count:
        raise DataError(
            f"{path}: the column {name!r} has {column.null_count} missing values; remove these rows"
        )
    shape, parts = [len(column)], [_plain(part) for part in column.chunks]
    while parts and hasattr(parts[0], "flatten") and hasattr(parts[0].type, "value_type"):
        lengths = {int(each) for part in parts for each in _lengths(part)}
        if len(lengths) != 1:
            raise DataError(
                f"{path}: the lists in the column {name!r} have from {min(lengths)} to {max(lengths)} items; "
                "crop or pad them to one length"
            )
        shape.append(lengths.pop())
        parts = [_plain(part.flatten()) for part in parts]
    values = [part.to_numpy(zero_copy_only=False) for part in parts]
    return np.concatenate(values).reshape(shape) if values else np.empty(shape)


def _plain(part: Any) -> Any:
    """Return the storage of an extension type, such as the arrays of Hugging Face."""
    return getattr(part, "storage", part)


def _lengths(part: Any) -> list[int]:
    import pyarrow.compute as pc

    found: list[int] = pc.list_value_length(part).unique().to_pylist()
    return found
