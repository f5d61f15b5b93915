"""`shardscope runs`: list the runs on disk, newest first."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shardscope.commands._table import aligned
from shardscope.runtime.status import printable
from shardscope.spec.user_code import label_of

if TYPE_CHECKING:
    from shardscope.runtime import Run


def add_to(commands: Any) -> None:
    """Add this command to the parser's commands."""
    parser = commands.add_parser("runs", help="list the runs on disk, newest first")
    parser.add_argument("--root", type=Path, help="folder of the runs (default: $SHARDSCOPE_RUNS or ./runs)")
    parser.add_argument("--json", action="store_true", help="print them as JSON")
    parser.set_defaults(carry_out=carry_out)


def carry_out(arguments: argparse.Namespace) -> int:
    """Print one row per run."""
    from shardscope.runtime import runs

    found = runs(arguments.root)
    if arguments.json:
        skipped = [{"id": name, "problem": reason} for name, reason in found.skipped]
        print(json.dumps([*map(describe, found), *skipped], indent=2))
        return 0
    rows = [_cells(describe(run)) for run in found]
    if rows:
        print(aligned(["run", "state", "strategy", "ranks", "model", "steps"], rows))
    elif not found.skipped:
        print("no runs yet; start one with: shardscope run")
    for name, reason in found.skipped:
        print(f"skipped: {name} ({reason})", file=sys.stderr)
    return 0


def describe(run: Run) -> dict[str, Any]:
    """Return a few plain values that describe a run."""
    job = run.job
    return {
        "id": run.id, "path": str(run.path), "state": run.state, "strategy": job.strategy.label,
        "world_size": job.world_size, "model": label_of(job.model), "steps": job.steps,
    }  # fmt: skip


def _cells(row: dict[str, Any]) -> list[str]:
    return [printable(str(row[key])) for key in ("id", "state", "strategy", "world_size", "model", "steps")]
