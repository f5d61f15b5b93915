"""Reading of measured data sets from a file of published figures, each by the module for its columns."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from published import foundry, simumax, titan, vtrain
from shardscope.errors import DataError
from shardscope.measure.calibrate.rows import Row

READERS: Mapping[str, Callable[[Mapping[str, Any], str], list[Row]]] = {
    "vtrain_ground_truth_multi": partial(vtrain.rows, recompute="full"),
    "vtrain_ground_truth_single": partial(vtrain.rows, recompute="none"),
    "llm_foundry_benchmarks": foundry.rows,
    "simumax_b200": simumax.rows,
    "torchtitan_benchmarks": titan.rows,
}
"""The reader of each data set with step times."""


def load(path: Path) -> dict[str, list[Row]]:
    """The rows of every data set in a JSON file: ``{"vtrain_ground_truth_multi": {"columns": [...], "rows": [...]}}``.

    Raises:
        DataError: There is no such file, it is not JSON, or it holds none of the data sets.
    """
    try:
        blocks = json.loads(path.read_text("utf-8"))
    except OSError as error:
        raise DataError(f"rows={str(path)!r} cannot be read: {error.strerror}") from None
    except ValueError as error:
        raise DataError(f"rows={str(path)!r} is not JSON: {error}") from None
    found = blocks if isinstance(blocks, dict) else {}
    try:
        rows = {name: read(found[name], name) for name, read in READERS.items() if name in found}
    except (KeyError, TypeError, IndexError) as error:
        raise DataError(f"rows={str(path)!r} lacks what its data set needs: {error!r}") from None
    if not rows:
        raise DataError(
            f"rows={str(path)!r} holds no data set with step times; known are {', '.join(READERS)}"
        )
    return rows
