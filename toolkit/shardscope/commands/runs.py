"""`shardscope runs`: list the runs on disk, newest first."""

from __future__ import annotations

import argparse
import sys
from typing import TYPE_CHECKING, Any

from shardscope.commands._options import add_root
from shardscope.commands._output import OF_STATE, aligned, as_json, coloured
from shardscope.runlog.figures import FIGURES, figure_text
from shardscope.runtime.record.status import printable, state_text
from shardscope.spec.job_parts import label_of

if TYPE_CHECKING:
    from shardscope.runtime import Run


HELP = "list the runs on disk, newest first"
JSON = "print the runs as JSON"


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of this command."""
    add_root(parser)
    parser.add_argument(
        "--all",
        action="store_true",
        help="also list runs that tools launched for measurements, such as checks",
    )
    parser.add_argument(
        "--group", help="only the runs of this group; by default, a group is a model and its data"
    )


def carry_out(arguments: argparse.Namespace) -> int:
    """Print one row per run, and a line on stderr for each run that was skipped."""
    from shardscope.runtime import runs

    found = runs(arguments.root, all=arguments.all, group=arguments.group)
    if arguments.json:
        skipped = [{"id": name, "problem": reason} for name, reason in found.skipped]
        print(as_json([*map(describe, found), *skipped]))
        return 0
    rows = [describe(run) for run in found]
    if rows:
        columns = [name for name in _COLUMNS if name in _ALWAYS or any(row[name] for row in rows)]
        print(
            aligned(
                [_COLUMNS[name] for name in columns], [_cells(row, columns) for row in rows], paint=_paint
            )
        )
    elif not found.skipped:
        known = sorted({run.group for run in runs(arguments.root, all=True)}) if arguments.group else []
        hint = f"no runs in group {arguments.group!r}; the groups are {', '.join(known)}"
        print(hint if known else "no runs yet; start one with: shardscope run")
    for name, reason in found.skipped:
        print(f"skipped: {name} ({reason})", file=sys.stderr)
    return 0


_COLUMNS = {
    "id": "run", "state": "state", "group": "group", "strategy": "strategy", "world_size": "ranks", "steps": "steps",
    "loss": FIGURES["loss"].label, "made_by": "made by", "note": "note",
}  # fmt: skip
_ALWAYS = frozenset(_COLUMNS) - {"made_by", "note"}


def describe(run: Run) -> dict[str, Any]:
    """Return a run's identity, state and results, for JSON; the loss is None until the run has ended."""
    job, summary = run.job, run.stored_summary
    return {
        "id": run.id, "path": str(run.path), "state": run.state, "restarts": run.restarts,
        "cause": run.cause, "strategy": job.strategy.label, "world_size": job.world_size, "model": label_of(job.model),
        "steps": job.steps, "group": run.group,
        "made_by": run.made_by, "note": run.note, "loss": summary and summary.loss,
        "diverged_at": summary and summary.diverged_at,
    }  # fmt: skip


def _paint(cell: str) -> str:
    """Colour the state of a run, which is padded to the width of its column."""
    colour = OF_STATE.get(cell.strip().partition(",")[0].partition(" ")[0])
    return coloured(cell, colour) if colour else cell


def _cells(row: dict[str, Any], columns: list[str]) -> list[str]:
    state = state_text(row["state"], row["restarts"], row["cause"])
    texts = {
        **row,
        "state": state,
        "loss": figure_text("loss", row["loss"], "-"),
        "note": " ".join(row["note"].split()),
    }
    if row["diverged_at"] is not None:
        texts["state"] = f"{state}, diverged at step {row['diverged_at']}"
    return [printable(str(texts[name] or "")) for name in columns]
