"""Number of rows that a job trains on, read from the sizes and headers of its data files before any rank opens them."""

from __future__ import annotations

import zipfile
from functools import lru_cache
from pathlib import Path

import numpy as np

from shardscope.errors import DataError
from shardscope.spec import Job
from shardscope.spec.data import DATA, is_path
from shardscope.spec.models import GPTConfig, model_config
from shardscope.spec.shards import Shards
from shardscope.storage import python_source
from shardscope.storage.formats import holds_shards, open_shards
from shardscope.storage.parts import hold_out, num_windows, whole_parts

SEQ = 64
"""Tokens per row of a model without a sequence length."""
_TEST_SHARE = 0.05
_EVERY = 10
_READERS = {1: np.lib.format.read_array_header_1_0, 2: np.lib.format.read_array_header_2_0}


def require_rows(global_batch: int, num_rows: int) -> None:
    """Check that data have enough rows for a global batch.

    Raises:
        DataError: `global_batch` is less than 1 or greater than `num_rows`.
    """
    if not 1 <= global_batch <= num_rows:
        raise DataError(
            f"global_batch={global_batch} is out of range for data with {num_rows} rows; "
            f"use a size from 1 to {num_rows}"
        )


def require_batch(job: Job) -> None:
    """Check that a job's data have enough rows for its global batch, if their number is known before the job starts.

    Raises:
        DataError: The data have fewer rows than the global batch.
    """
    rows = training_rows(job)
    if rows is not None:
        require_rows(job.batch.global_batch, rows)


def training_rows(job: Job) -> int | None:
    """Return the number of rows that a job trains on.

    The result is None if the user's code determines the number, or if the data have no rows or cannot be read; in the
    last two cases, the ranks report the reason.
    """
    is_named = isinstance(job.model, str)
    config = model_config(job.model) if isinstance(job.model, str) else None
    seq = config.seq if isinstance(config, GPTConfig) else SEQ
    try:
        if isinstance(job.data, Shards):
            found = _rows_of_shards(job.data, seq, is_known=is_named)
        else:
            found = _rows_of(job.data, seq, is_known=is_named) if isinstance(job.data, str) else None
    except Exception:  # noqa: BLE001 - NumPy evaluates headers, so damage raises any error
        return None
    return found or None


def _rows_of(data: str, seq: int, *, is_known: bool) -> int | None:
    """Return the number of training rows of named data or a path; `is_known`: tells whether the sequence length is
    known.
    """
    if data in DATA and (counted := DATA[data].num_training_rows) is not None:
        return counted
    path = Path(data).expanduser()
    if data not in DATA and (not is_path(data) or not path.exists()):
        return None
    if data not in DATA and holds_shards(path):
        return _rows_of_shards(Shards(path=str(path)), seq, is_known=is_known)
    if path.suffix.lower() == ".npz":
        return _rows_of_npz(path)
    if not is_known:
        return None
    return _rows_of_python_source(seq) if data in DATA else _rows_of_tokens(_num_tokens(path), seq)


@lru_cache(maxsize=16)
def _rows_of_python_source(seq: int) -> int:
    return _rows_of_tokens(len(python_source.tokens()), seq)


def _rows_of_tokens(tokens: int, seq: int) -> int:
    return num_windows(tokens - held_out_tokens(tokens, seq), seq)


def training_parts(data: Shards, seq: int) -> int:
    """Return the number of training rows of shards."""
    whole = whole_parts(open_shards(data), seq)
    return sum(part.num_rows for part in (whole if data.test is not None else hold_out(whole)[0]))


def _rows_of_shards(data: Shards, seq: int, *, is_known: bool) -> int | None:
    return None if not is_known and open_shards(data).holds_tokens else training_parts(data, seq)


def held_out_tokens(num_tokens: int, seq: int) -> int:
    """Return how many tokens at the end of a text are held out for testing: 5 %, but at least one window."""
    return max(int(num_tokens * _TEST_SHARE), seq + 1)


def held_out_every(num_rows: int) -> int:
    """Return n: every n-th row of a data set without a test set is held out for testing."""
    return min(_EVERY, num_rows)


def _num_tokens(path: Path) -> int:
    match path.suffix.lower():
        case ".npy":
            tokens = np.load(path, mmap_mode="r", allow_pickle=False)
            return len(tokens) if tokens.ndim == 1 else 0
        case ".bin":
            return path.stat().st_size // 2
        case _:
            return path.stat().st_size


def _rows_of_npz(path: Path) -> int:
    """Return the number of training rows in an ``.npz`` file, from the headers of its arrays."""
    with zipfile.ZipFile(path) as arrays:
        names = set(arrays.namelist())
        with arrays.open("x.npy") as file:
            version = np.lib.format.read_magic(file)[0]
            shape, _, _ = _READERS[version](file)
    rows = int(shape[0]) if shape else 0
    return rows if {"x_test.npy", "y_test.npy"} <= names else rows - rows // max(1, held_out_every(rows))
