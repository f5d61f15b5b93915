"""Shards as Parquet files, and as the Arrow files of a Hugging Face `Dataset`, read by pyarrow."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from shardscope.errors import DataError
from shardscope.spec.units import plural
from shardscope.storage.formats import Array, ShardInfo, not_a_column, paired, require_alike

_HEADER_BYTES = 128
"""Size of the header of a small ``.npy`` file."""


class TableShards:
    """Shards that are tables with a column of inputs and a column of targets: numbers, or lists of equal length.

    An Arrow stream may lack an end marker, so a stream truncated exactly between two batches cannot be distinguished
    from a complete one; any other truncation is an error.

    Raises:
        DataError: pyarrow is not installed, or the columns of two files have different types.
    """

    fields = ("x", "y")
    is_mapped = holds_tokens = False

    def __init__(self, files: Sequence[Path], inputs: str, targets: str, *, is_parquet: bool) -> None:
        self.columns, self._is_parquet = (inputs, targets), is_parquet
        self._arrow = _pyarrow()
        self._kinds: list[tuple[Path, object]] = []
        self.shards = tuple(self._info(path) for path in files)
        require_alike(self._kinds)

    def read(self, index: int) -> Array:
        """Return the rows of a shard."""
        path = self.shards[index].path
        with self._errors(path):
            table = self._table(path)
            x, y = (_array(table.column(name), name, path) for name in self.columns)
        return paired(x, y, where=str(path))

    def _info(self, path: Path) -> ShardInfo:
        with self._errors(path):
            if not self._is_parquet:
                table = self._table(path)
                self._note(path, table.schema)
                sizes = (
                    _num_values(table.column(name)) * _width(table.schema, name) for name in self.columns
                )
                return ShardInfo(path, table.num_rows, path.stat().st_size, _HEADER_BYTES + sum(sizes))
            with self._arrow.parquet.ParquetFile(path) as file:
                self._note(path, file.schema_arrow)
                sizes = (
                    _num_stored(file.metadata, name) * _width(file.schema_arrow, name)
                    for name in self.columns
                )
                return ShardInfo(
                    path, file.metadata.num_rows, path.stat().st_size, _HEADER_BYTES + sum(sizes)
                )

    def _note(self, path: Path, schema: Any) -> None:
        """Record the types of a file's columns; raise an error if a column is missing."""
        for name in self.columns:
            if name not in schema.names:
                raise not_a_column(name, schema.names, where=str(path))
        kinds = dict.fromkeys(f"{name}: {schema.field(name).type}" for name in self.columns)
        self._kinds.append((path, ", ".join(kinds)))

    def _table(self, path: Path) -> Any:
        if self._is_parquet:
            return self._arrow.parquet.read_table(
                path, columns=[*dict.fromkeys(self.columns)], page_checksum_verification=True
            )
        return self._arrow.ipc.open_stream(self._arrow.memory_map(str(path))).read_all()

    @contextmanager
    def _errors(self, path: Path) -> Iterator[None]:
        """Turn errors of pyarrow, such as that of a damaged page, into a `DataError`."""
        try:
            yield
        except (self._arrow.ArrowException, OSError) as error:
            raise DataError(
                f"{path} cannot be read as {path.suffix}: {' '.join(str(error).split())}; write the file again"
            ) from None


def _pyarrow() -> Any:
    try:
        import pyarrow as pa
        import pyarrow.ipc
        import pyarrow.parquet
    except ImportError as error:
        raise DataError(
            "data in .parquet and .arrow files is read by pyarrow, which is not installed; "
            "run pip install pyarrow"
        ) from error
    return pa


def _array(column: Any, name: str, path: Path) -> Array:
    """Return a column as an array, with one more dimension for each level of lists."""
    shape, parts = [len(column)], [_plain(part) for part in column.chunks]
    _require_complete(parts, name, path)
    while _are_lists(parts):
        lengths = {int(each) for part in parts for each in _lengths(part)}
        if len(lengths) != 1:
            raise DataError(
                f"{path}: the lists in the column {name!r} have from {min(lengths)} to {max(lengths)} items; "
                "crop or pad them to one length"
            )
        shape.append(lengths.pop())
        parts = [_plain(part.flatten()) for part in parts]
        _require_complete(parts, name, path)
    values = [part.to_numpy(zero_copy_only=False) for part in parts]
    return np.concatenate(values).reshape(shape) if values else np.empty(shape)


def _require_complete(parts: Sequence[Any], name: str, path: Path) -> None:
    """Raise an error if one level of lists, or the values in them, contain nulls; in an array, they would become
    NaN.
    """
    missing = sum(part.null_count for part in parts)
    if missing:
        raise DataError(
            f"{path}: the column {name!r} has {plural(missing, 'missing value')}; remove these rows"
        )


def _are_lists(parts: Sequence[Any]) -> bool:
    return bool(parts) and hasattr(parts[0], "flatten") and hasattr(parts[0].type, "value_type")


def _num_values(column: Any) -> int:
    """Return the number of values of a column, over all lists in it."""
    parts = [_plain(part) for part in column.chunks]
    while _are_lists(parts):
        parts = [_plain(part.flatten()) for part in parts]
    return sum(len(part) for part in parts)


def _num_stored(metadata: Any, name: str) -> int:
    """Return the number of values in a column of a Parquet file, from its metadata."""
    chunks = (
        metadata.row_group(group).column(place)
        for group in range(metadata.num_row_groups)
        for place in range(metadata.num_columns)
    )
    return sum(each.num_values for each in chunks if f"{each.path_in_schema}.".startswith(f"{name}."))


def _width(schema: Any, name: str) -> int:
    """Return the size of one value of a column in an array, in bytes."""
    kind = _plain_type(schema.field(name).type)
    while hasattr(kind, "value_type"):
        kind = _plain_type(kind.value_type)
    try:
        return max(1, int(kind.bit_width) // 8)
    except ValueError:  # text, which `paired` refuses
        return 1


def _plain_type(kind: Any) -> Any:
    return getattr(kind, "storage_type", kind)


def _plain(part: Any) -> Any:
    """Return the storage of an extension type, such as Hugging Face's array types."""
    return getattr(part, "storage", part)


def _lengths(part: Any) -> list[int]:
    import pyarrow.compute as pc

    found: list[int] = pc.list_value_length(part).unique().to_pylist()
    return found
