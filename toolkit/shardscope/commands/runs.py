"""`shardscope runs`: the runs on disk, newest first."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shardscope.commands._table import aligned

if TYPE_CHECKING:
    from shardscope.runtime import Run


def add_to(commands: Any) -> None:
    """Add this command to the parser's commands."""
    parser = commands.add_parser("runs", help="list the runs on disk, newest first")
    parser.add_argument("--root", type=Path, help="folder of the runs (default: $SHARDSCOPE_RUNS or ./runs)")
    parser.add_argument("--json", action="store_true", help="print them as JSON")
    parser.set_defaults(carry_out=carry_out)


def carry_out(arguments: argparse.Namespace) -> int:
    """Print one row a run."""
    from shardscope.runtime import runs

    rows = [describe(run) for run in runs(arguments.root)]
    if arguments.json:
        print(json.dumps(rows, indent=2))
    elif rows:
        print(aligned(["run", "state", "strategy", "ranks", "model", "steps"], [_cells(row) for row in rows]))
    else:
        print("no runs yet; start one with: shardscope run")
    return 0


def describe(run: Run) -> dict[str, Any]:
    """A run in a few plain values; a run whose job cannot be read any more still shows its state."""
    about: dict[str, Any] = {"id": run.id, "path": str(run.path), "state": run.state}
    try:
        job = run.job
    except ValueError as error:
        return {**about, "problem": str(error)}
    model = job.model if isinstance(job.model, str) else getattr(job.model, "name", "own model")
    return {
        **about,
        "strategy": job.strategy.label,
        "world_size": job.world_size,
        "model": model,
        "steps": job.steps,
    }


def _cells(row: dict[str, Any]) -> list[str]:
    return [str(row.get(key, "?")) for key in ("id", "state", "strategy", "world_size", "model", "steps")]
