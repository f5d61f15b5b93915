"""A run's spans as a Chrome trace."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from shardscope.errors import SpecError
from shardscope.runlog.chrome_trace import write_trace

if TYPE_CHECKING:
    from shardscope.runtime.record.run import Run


def write_chrome_trace(run: Run, path: str | Path) -> str:
    """Write the spans of a run to a file, compressed if its name ends in ``.gz``, and return its path.

    Raises:
        SpecError: The run has recorded no spans.
    """
    spans = run.timeline()
    if not len(spans):
        raise SpecError(
            f"run {run.id} has recorded no spans; launch it with Record(spans_first=100), for example"
        )
    about = {"run": run.id, "strategy": run.job.strategy.label, "provenance": str(run.provenance or "")}
    return write_trace(spans, path, about)
