"""Events as pandas data frames, and a run's HTML card in a notebook."""

from __future__ import annotations

from html import escape
from typing import TYPE_CHECKING

import pandas as pd

from shardscope.runtime.schema import printable
from shardscope.runtime.summary import mean_loss, number, sent_bytes, steps_of
from shardscope.runtime.tail import Event

if TYPE_CHECKING:
    from shardscope.runtime.run import Run

_METRICS = [
    "step", "t", "loss", "step_time_s", "samples_per_s", "tokens_per_s", "lr", "grad_norm", "bytes_sent",
    "memory_bytes", "max_memory_bytes",
]  # fmt: skip
_MEMORY = ["rank", "step", "parameters", "gradients", "optimizer", "activations", "gathered", "buffers"]
_TIMELINE = ["rank", "step", "lane", "name", "start_s", "end_s", "bytes"]


def metrics_frame(events: list[Event]) -> pd.DataFrame:
    """Return one row for each step that all ranks have finished."""
    return pd.DataFrame(
        [_metrics_row(step, rows) for step, rows in steps_of(events).items()], columns=_METRICS
    )


def _metrics_row(step: int, rows: list[Event]) -> tuple[object, ...]:
    seconds = max(row["step_time_s"] for row in rows)
    tokens = sum(row["tokens"] or 0 for row in rows)
    norms = [number(row["grad_norm"]) for row in rows if row["grad_norm"] is not None]
    return (
        step,
        max(row["t"] for row in rows),
        mean_loss(rows),
        seconds,
        sum(row["samples"] for row in rows) / seconds,
        tokens / seconds if tokens else None,
        rows[0]["lr"],
        max(norms, default=None),
        sum(map(sent_bytes, rows)),
        max(row["memory_bytes"] for row in rows),
        max(row["peak_memory_bytes"] for row in rows),
    )


def timeline_frame(steps: list[Event]) -> pd.DataFrame:
    """Return one row for each span of each rank, with times in seconds from the first span."""
    rows = [(e["rank"], e["step"], *span) for e in steps for span in e.get("spans", ())]
    frame = pd.DataFrame(rows, columns=_TIMELINE)
    if len(frame):
        zero = frame["start_s"].min()
        frame[["start_s", "end_s"]] -= zero
    return frame.sort_values(["rank", "start_s"], ignore_index=True)


def memory_frame(measured: list[Event]) -> pd.DataFrame:
    """Return one row for each rank and measured step, with the peak of each kind of memory in bytes."""
    rows = [tuple(event[column] for column in _MEMORY) for event in measured]
    return pd.DataFrame(rows, columns=_MEMORY).sort_values(["step", "rank"], ignore_index=True)


def run_html(run: Run) -> str:
    """Return a run as a small HTML table, with all text escaped."""
    summary, error = run.summary(), run.error
    rows = {
        "state": run.state,
        "strategy": f"{run.job.strategy.label}, {run.job.world_size} ranks",
        "steps": f"{summary.steps} of {run.job.steps}",
        "loss": "" if summary.loss is None else f"{summary.loss:.4f}",
        "step time": "" if summary.step_time_s is None else f"{summary.step_time_s * 1e3:.1f} ms",
        "link": summary.link or "",
        "directory": printable(str(run.path)),
        "made with": str(run.provenance or ""),
    }
    cells = "".join(f"<tr><th style='text-align:left'>{escape(k)}</th><td style='text-align:left'>{escape(v)}</td></tr>"
                    for k, v in rows.items() if v)  # fmt: skip
    problem = f"<pre>{escape(str(error))}</pre>" if error else ""
    damage = "".join(f"<div>{escape(text)}</div>" for text in run.problems)
    return f"<div><strong>{escape(run.name)}</strong><table>{cells}</table>{problem}{damage}</div>"
