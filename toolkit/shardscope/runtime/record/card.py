"""The card that shows a run in a notebook."""

from __future__ import annotations

from html import escape
from typing import TYPE_CHECKING

from shardscope import show
from shardscope.runlog.figures import FIGURES, figure_text
from shardscope.runtime.record.status import printable
from shardscope.show import Sentences, Table
from shardscope.spec.units import plural

if TYPE_CHECKING:
    from shardscope.runlog.summary import Summary
    from shardscope.runtime.record.run import Run


_FIGURES = (
    "loss",
    "loss_mean",
    "test_accuracy",
    "step_time_s",
    "bytes_per_step",
    "held_bytes",
    "process_bytes",
    "mfu",
    "link_utilization",
    "expert_imbalance",
    "dropped_tokens",
)


def recovery_facts(summary: Summary) -> dict[str, str]:
    """Return the metrics about restarts by their labels; empty for a run without restarts."""
    names = ("lost_steps", "goodput") if summary.restarts else ()
    return {FIGURES[name].label: figure_text(name, getattr(summary, name), "") for name in names}


def run_html(run: Run) -> str:
    """Return a run as a small HTML table, with all text escaped."""
    summary, error = run.summary(), run.error
    at = summary.diverged_at
    ranks = f"{summary.world_sizes} ranks" if summary.world_sizes else plural(run.job.world_size, "rank")
    rows = {
        "state": run.state_text if at is None else f"{run.state_text}; the loss diverged at step {at}",
        "reason": run.reason or "",
        "group": run.group,
        "strategy": f"{run.job.strategy.label}, {ranks}",
        "steps": run.job.progress(summary.last_step),
        **{FIGURES[name].label: figure_text(name, getattr(summary, name), "") for name in _FIGURES},
        **recovery_facts(summary),
        "faults": run.faults.text if run.faults else "",
        "link": summary.link or "",
        "straggler": summary.straggler or "",
        "loss note": summary.loss_note or "",
        "optimizer note": summary.optimizer_note or "",
        "samples per rank": summary.shares or "",
        "note": run.note,
        "directory": printable(str(run.path)),
        "made with": str(run.provenance or ""),
    }
    facts = Table((), [(name, text) for name, text in rows.items() if text], num_left=2, has_row_heads=True)
    problem = f"<pre>{escape(str(error))}</pre>" if error else ""
    return show.html([Sentences([run.name, *run.problems]), facts]) + problem
