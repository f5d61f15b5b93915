"""A run's tables as Parquet files: ``steps``, ``spans`` and ``traffic``."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from shardscope.runtime.export._library import missing

if TYPE_CHECKING:
    import pandas as pd

    from shardscope.runtime.record.run import Run

_COUNTS = ["payload_bytes", "sent_bytes", "received_bytes", "messages", "calls"]


def write_parquet(run: Run, path: str | Path) -> str:
    """Write the tables of a run into a folder, and return its path.

    ``steps`` is `Run.metrics`, ``spans`` is `Run.timeline`, ``traffic`` is `traffic_frame`.

    Raises:
        SpecError: pandas finds no library that writes Parquet.
    """
    folder = Path(path)
    folder.mkdir(parents=True, exist_ok=True)
    for name, frame in (("steps", run.metrics()), ("spans", run.timeline()), ("traffic", traffic_frame(run))):
        try:
            frame.to_parquet(folder / f"{name}.parquet")
        except ImportError as error:
            raise missing("pyarrow", "parquet", ModuleNotFoundError()) from error
    return str(folder)


def traffic_frame(run: Run) -> pd.DataFrame:
    """Return a data frame with one row for each rank, event and collective with counted traffic.

    Columns: event (``step``; ``traffic`` for messages that a parameter server sent for a step that had already ended;
    ``eval``, ``test``, ``end``), rank, step (missing for ``end``), collective (its name), payload_bytes, sent_bytes,
    received_bytes, messages and calls.
    """
    import pandas as pd

    rows = [
        (event["event"], event["rank"], event.get("step"), name, *(row.get(count) for count in _COUNTS))
        for event in run.events()
        for name, row in event.get("traffic", {}).items()
    ]
    frame = pd.DataFrame(rows, columns=["event", "rank", "step", "collective", *_COUNTS])
    return frame.astype(dict.fromkeys(["rank", "step", *_COUNTS], "Int64"))
