"""`shardscope check`: train a job sharded and on one process, and compare the results."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shardscope.commands._job import add_job_options, build_job
from shardscope.commands._signals import Terminated, sigterm_interrupts
from shardscope.commands._table import aligned

if TYPE_CHECKING:
    from shardscope.runtime import Run
    from shardscope.runtime.check_report import CheckReport

STEPS = 8
ROWS = 8


def add_to(commands: Any) -> None:
    """Add this command to the parser's commands."""
    parser = commands.add_parser(
        "check",
        help="run a job sharded and on one process, and compare every loss and parameter",
        description="Run a job sharded and on one process, and compare every loss and parameter. "
        "Exit status 1 if they do not agree.",
    )
    add_job_options(parser, steps=STEPS)
    parser.add_argument("--root", type=Path, help="folder of the runs (default: $SHARDSCOPE_RUNS or ./runs)")
    parser.add_argument("--json", action="store_true", help="print the report as JSON and no progress")
    parser.set_defaults(carry_out=carry_out)


def carry_out(arguments: argparse.Namespace) -> int:
    """Run the check, print the verdict and the parameters that differ most; return 1 if the results do not agree."""
    steps, arguments.steps = arguments.steps, None  # a job file may have more steps than the check
    job = build_job(arguments)

    from shardscope.runtime.check import check

    on_step = None if arguments.json else _Announcer()
    try:
        with sigterm_interrupts():
            report = check(job, STEPS if steps is None else steps, root=arguments.root, on_step=on_step)
    except Terminated:
        return 143
    print(report.to_json() if arguments.json else text(report))
    return 1 if report.passed is False or not report.was_tried else 0


def text(report: CheckReport) -> str:
    """Return the parameters that differ most as a table, and the verdict."""
    rows = [
        (row.tensor, "x".join(map(str, row.shape)), f"{row.relative_difference:.1e}", f"{row.share:.0%}")
        for row in report.tensors[:ROWS]
    ]
    left = len(report.tensors) - len(rows)
    more = [f"and {left} more, none with a larger difference (--json lists all)"] if left > 0 else []
    table = aligned(["parameter", "shape", "relative difference", "share"], rows)
    return "\n".join([table, *more, "", report.verdict])


class _Announcer:
    """Prints on stderr which run is in progress, once per run."""

    def __init__(self) -> None:
        self._run = ""

    def __call__(self, run: Run, _steps: int) -> None:
        if run.id != self._run:
            self._run = run.id
            ranks = "1 process" if run.job.world_size == 1 else f"{run.job.world_size} ranks"
            print(f"running {run.job.strategy.label} on {ranks} for {run.job.steps} steps", file=sys.stderr)
