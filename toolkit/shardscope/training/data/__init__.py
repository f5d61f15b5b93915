"""Training data: opens a data set by name, from files or from a user's function, and reads each rank's batches.

`load_data` returns a `Dataset` with training, validation and test rows. A `GlobalSampler` chooses the rows of each
step's global batch, `shard` selects one rank's rows from them, and a `Loader` reads those rows.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from shardscope.spec.data import data_info, is_path
from shardscope.spec.shards import Shards
from shardscope.storage.formats import holds_shards
from shardscope.training.data.batches import Batch, call, map_tensors, num_rows, read_batch, split, tensors_of
from shardscope.training.data.digits import read_digits
from shardscope.training.data.files import read_path
from shardscope.training.data.loader import Loader
from shardscope.training.data.sampler import GlobalSampler, shard
from shardscope.training.data.shard_source import read_shards
from shardscope.training.data.sources import Dataset, DataSource
from shardscope.training.data.text import read_python_source
from shardscope.training.data.user import call_user

__all__ = [
    "Batch",
    "Dataset",
    "GlobalSampler",
    "Loader",
    "DataSource",
    "call",
    "load_data",
    "map_tensors",
    "num_rows",
    "read_batch",
    "shard",
    "split",
    "tensors_of",
]


def load_data(
    data: str | Path | Shards | Callable[..., Any],
    *,
    seed: int = 0,
    seq: int = 64,
    vocab: int | None = None,
) -> Dataset:
    """Open the data of a job, with a validation split (see `Dataset.with_validation`).

    Args:
        data: A name in `shardscope.spec.data.DATA`, the path of a file or of shards, shards with settings, or a
            function that returns the data.
        seed: Passed to a function in `data` that has a parameter `seed`; not used otherwise.
        seq: Tokens per window, for text and other token data.
        vocab: The model's vocabulary size; reading a token outside it raises an error. None accepts all tokens.

    Raises:
        SpecError: No data set has this name.
        DataError: The data cannot be read, or have the wrong shape or type.
    """
    return _open(data, seed=seed, seq=seq, vocab=vocab).with_validation()


def _open(
    data: str | Path | Shards | Callable[..., Any], *, seed: int, seq: int, vocab: int | None
) -> Dataset:
    if isinstance(data, Shards):
        return read_shards(data, seq=seq, vocab=vocab)
    if callable(data):
        return call_user(data, seed=seed)
    if data == "digits":
        return read_digits()
    if data == "python-source":
        return read_python_source(seq=seq, vocab=vocab)
    if isinstance(data, str) and not is_path(data):
        data_info(data)
    path = Path(data).expanduser()
    if holds_shards(path):
        return read_shards(Shards(path=str(path)), seq=seq, vocab=vocab)
    return read_path(path, seq=seq, vocab=vocab)
