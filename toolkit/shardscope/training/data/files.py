"""Data sets in the user's own files: text, arrays of samples, or arrays of tokens. No file is ever unpickled."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np

from shardscope.errors import DataError
from shardscope.training.data.sources import Array, ArraySource, Dataset, hold_out
from shardscope.training.data.text import split_windows


def read_path(path: Path, *, seq: int, vocab: int | None = None) -> Dataset:
    """Open a data file; its suffix decides how it is read.

    - ``.npz``: arrays `x` and `y` with the training samples, one per row. The test rows are `x_test` and `y_test` or,
      if these are missing, every tenth row of `x` and `y`. The validation rows are `x_validation` and `y_validation`
      or, if these are missing, half of the test rows.
    - ``.npy``: a one-dimensional array of integer tokens, memory-mapped.
    - ``.bin``: tokens as raw little-endian uint16, memory-mapped.
    - any other suffix: text, one token per byte, memory-mapped.

    Args:
        path: The file.
        seq: Tokens per window, for files of tokens or text.
        vocab: The model's vocabulary size; reading a token outside it raises an error. None accepts all tokens.

    Raises:
        DataError: The file is missing, empty or unreadable, or its arrays have the wrong shape or type.
    """
    _require_file(path)
    try:
        return (
            _rows(path)
            if path.suffix.lower() == ".npz"
            else split_windows(_tokens(path), seq=seq, vocab=vocab)
        )
    except DataError as error:
        raise DataError(f"data={str(path)!r}: {error}") from None
    except Exception as error:  # noqa: BLE001 - NumPy evaluates headers, so damage raises any error
        why = (str(error) or type(error).__name__).splitlines()[0]
        raise DataError(f"data={str(path)!r} cannot be read as {path.suffix or 'text'}: {why}") from None


def _require_file(path: Path) -> None:
    if not path.exists():
        raise DataError(
            f"data={str(path)!r} does not exist; give the path of a text, .npz, .npy or .bin file, or of shards"
        )
    if not path.is_file():
        raise DataError(f"data={str(path)!r} is not a regular file; give the path of a file")
    if path.stat().st_size == 0:
        raise DataError(f"data={str(path)!r} is empty; give a non-empty file")


def _rows(path: Path) -> Dataset:
    with np.load(path, allow_pickle=False) as arrays:
        names = set(arrays.files)
        if not {"x", "y"} <= names:
            found = ", ".join(sorted(names)) or "nothing"
            raise DataError(
                f"the arrays x and y are required, but the file has {found}; save it with np.savez(path, x=inputs, "
                "y=targets)"
            )
        source = ArraySource(arrays["x"], arrays["y"])
        test, validation = (
            ArraySource(arrays[f"x_{split}"], arrays[f"y_{split}"])
            if {f"x_{split}", f"y_{split}"} <= names
            else None
            for split in ("test", "validation")
        )
    if test is None:
        return replace(hold_out(source), validation=validation)
    return Dataset(train=source, test=test, validation=validation)


def _tokens(path: Path) -> Array:
    tokens: Array
    match path.suffix.lower():
        case ".npy":
            tokens = np.atleast_1d(np.load(path, mmap_mode="r", allow_pickle=False))
        case ".bin":
            tokens = np.memmap(path, dtype="<u2", mode="r")
        case _:
            tokens = np.memmap(path, dtype=np.uint8, mode="r")
    return tokens
