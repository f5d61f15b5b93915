"""The run log as pandas data frames."""

from __future__ import annotations

import numpy as np
import pandas as pd

from shardscope.runlog.reducer import RunLog
from shardscope.runlog.schema import MEMORY_KINDS
from shardscope.runlog.tail import Event

_METRICS = (
    "number", "t", "loss", "step_time_s", "samples_per_s", "tokens_per_s", "lr", "grad_norm", "sent_bytes",
    "memory_bytes", "peak_memory_bytes", "world_size",
)  # fmt: skip
_COLUMNS = {"number": "step", "memory_bytes": "process_bytes_now", "peak_memory_bytes": "process_bytes"}
"""Columns that have another name in data frames than in the events."""
_TIMELINE = ["rank", "step", "lane", "name", "start_s", "end_s", "bytes"]


def metrics_frame(log: RunLog) -> pd.DataFrame:
    """Return a data frame of the metrics, with one row for each step that all ranks have finished."""
    frame = pd.DataFrame({name: np.asarray(log.steps.column(name)) for name in _METRICS})
    return frame.rename(columns=_COLUMNS).replace({"tokens_per_s": {0.0: np.nan}})


def timeline_frame(steps: list[Event]) -> pd.DataFrame:
    """Return a data frame with one row for each recorded span; times are in seconds since the first span started."""
    rows = [(e["rank"], e["step"], *span) for e in steps for span in e.get("spans", ())]
    frame = pd.DataFrame(rows, columns=_TIMELINE)
    if len(frame):
        zero = frame["start_s"].min()
        frame[["start_s", "end_s"]] -= zero
    return frame.sort_values(["rank", "start_s"], ignore_index=True)


def memory_frame(measured: list[Event]) -> pd.DataFrame:
    """Return a data frame of peak memory by type, in bytes, with one row for each rank and measured step."""
    columns = ["rank", "step", *MEMORY_KINDS]
    rows = [tuple(event[column] for column in columns) for event in measured]
    return pd.DataFrame(rows, columns=columns).sort_values(["step", "rank"], ignore_index=True)
