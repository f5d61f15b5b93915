"""The data sets that a job can name, and the models that can read them. Imports no torch and opens no file."""

from __future__ import annotations

from pathlib import Path

from shardscope.errors import SpecError, quoted, unknown_name
from shardscope.spec._base import Spec
from shardscope.spec.models import MODELS, Modality, model_config
from shardscope.spec.numbers import Count


class DataInfo(Spec):
    """Description of a built-in data set."""

    gives: Modality
    summary: str
    num_classes: Count
    """Number of distinct targets: the image classes, or the vocabulary size of a corpus."""
    num_rows: Count | None = None
    """Total number of rows; None if it differs between machines."""
    num_training_rows: Count | None = None
    """Number of rows to train on; None if it differs between machines."""


DATA: dict[str, DataInfo] = {
    "digits": DataInfo(
        gives="images",
        summary="handwritten digits of 8x8 pixels, bundled with scikit-learn",
        num_classes=10,
        num_rows=1797,
        num_training_rows=1442,
    ),
    "python-source": DataInfo(
        gives="tokens",
        summary="the Python standard library's own source, as bytes",
        num_classes=256,
    ),
}
"""All built-in data sets, by name. They contain real data, and none is downloaded."""

_TOKEN_SUFFIXES = frozenset({".txt", ".md", ".py", ".json", ".csv", ".npy", ".bin"})


def data_info(name: str) -> DataInfo:
    """Return the description of the data set called `name`.

    Raises:
        SpecError: There is no such data set; the message suggests the closest name.
    """
    if name not in DATA:
        raise unknown_name("data", name, DATA)
    return DATA[name]


def is_path(data: str) -> bool:
    """Return whether `data` looks like a path (with a folder or a suffix) rather than a name.

    Example:
        >>> is_path("digits"), is_path("./digits"), is_path("corpus.txt")
        (False, True, True)
    """
    return Path(data).suffix != "" or "/" in data or "\\" in data or data.startswith("~")


def gives(data: str) -> Modality | None:
    """Return the modality of `data`, a name or a path; None if it depends on the content of the file.

    Raises:
        SpecError: `data` is neither the name of a data set nor a path.
    """
    if data not in DATA and is_path(data):
        return "tokens" if Path(data).suffix.lower() in _TOKEN_SUFFIXES else None
    return data_info(data).gives


def check_compatible(model_name: str, data_name: str) -> None:
    """Check that a model from the catalogue can read the data, given by name or path.

    Raises:
        SpecError: The model reads tokens and the data provides images, or vice versa.
    """
    config, given = model_config(model_name), gives(data_name)
    if given is not None and given != config.reads:
        raise SpecError(
            f"data={quoted(data_name)} provides {given}, but model={model_name!r} reads {config.reads}; "
            f"use model={_first_model(given)!r} or data={_first_data(config.reads)!r}"
        )


def _first_model(reads: Modality) -> str:
    return next(name for name, config in MODELS.items() if config.reads == reads)


def _first_data(modality: Modality) -> str:
    return next(name for name, info in DATA.items() if info.gives == modality)
