"""The card that shows a run in a notebook."""

from __future__ import annotations

from html import escape
from typing import TYPE_CHECKING

from shardscope.runtime.status import printable

if TYPE_CHECKING:
    from shardscope.runtime.run import Run


def run_html(run: Run) -> str:
    """Return a run as a small HTML table, with all text escaped."""
    summary, error = run.summary(), run.error
    rows = {
        "state": run.state,
        "strategy": f"{run.job.strategy.label}, {run.job.world_size} ranks",
        "steps": run.job.progress(summary.last_step),
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
