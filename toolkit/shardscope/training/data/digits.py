"""The handwritten digits from scikit-learn, read from its installed files without importing it."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import numpy as np
import numpy.typing as npt

from shardscope.disk_cache import cached_array
from shardscope.errors import DataError
from shardscope.training.data.sources import Array, ArraySource, Dataset

_MAX_PIXEL = 16
_TEST_EVERY = 5


def read_digits() -> Dataset:
    """Read images `(N, 1, 8, 8)` in [0, 1] and classes `(N,)`; every fifth image of each class is a test image.

    Raises:
        DataError: scikit-learn is not installed.
    """
    table = cached_array("digits", _read_table)
    pixels, classes = table[:, :-1], table[:, -1]
    images = pixels.reshape(-1, 1, 8, 8).astype(np.float32) / _MAX_PIXEL
    is_test = _every_nth_of_each_class(classes)
    return Dataset(
        train=ArraySource(images[~is_test], classes[~is_test]),
        test=ArraySource(images[is_test], classes[is_test]),
    )


def _read_table() -> Array:
    """Read a table with one row per image: 64 pixels from 0 to 16, then the class."""
    package = find_spec("sklearn")
    if package is None or package.origin is None:
        raise DataError(
            "data='digits' is read from scikit-learn, which is not installed; run pip install scikit-learn"
        )
    path = Path(package.origin).parent / "datasets" / "data" / "digits.csv.gz"
    if not path.exists():
        raise DataError(
            f"data='digits' is read from the scikit-learn file {str(path)!r}, which is missing; reinstall scikit-learn"
        )
    return np.loadtxt(path, delimiter=",", dtype=np.uint8)


def _every_nth_of_each_class(classes: Array) -> npt.NDArray[np.bool_]:
    is_test = np.zeros(len(classes), dtype=bool)
    for label in np.unique(classes):
        is_test[np.flatnonzero(classes == label)[_TEST_EVERY - 1 :: _TEST_EVERY]] = True
    return is_test
