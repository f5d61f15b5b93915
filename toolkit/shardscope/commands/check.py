"""`shardscope check`: train a job with its strategy and on one process, and compare losses and parameters."""

from __future__ import annotations

import argparse
import sys
from textwrap import fill
from typing import TYPE_CHECKING

from shardscope.commands._job import add_job_options, build_job
from shardscope.commands._options import add_root
from shardscope.commands._output import aligned, coloured
from shardscope.commands._signals import Terminated, sigterm_interrupts

if TYPE_CHECKING:
    from shardscope.runtime import Run
    from shardscope.runtime.tools.check_report import CheckReport

STEPS = 8


HELP = "train a job with its strategy and on one process, and compare every loss and parameter"
ABOUT = (
    "Train a job with its strategy and on one process, and compare every loss and parameter. "
    "Exit status 1 if they do not agree."
)
JSON = "print the report as JSON and no progress"


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of this command."""
    add_job_options(parser, steps=STEPS)
    add_root(parser)


def carry_out(arguments: argparse.Namespace) -> int:
    """Run the check, and print the verdict and the parameters that differ most; return 1 if the results disagree."""
    steps, arguments.steps = arguments.steps, None  # a job file may have more steps than the check
    job = build_job(arguments)

    from shardscope.runtime.tools.check import check

    on_step = None if arguments.json else _Announcer()
    try:
        with sigterm_interrupts():
            report = check(job, STEPS if steps is None else steps, root=arguments.root, on_step=on_step)
    except Terminated:
        return 143
    print(report.to_json() if arguments.json else text(report))
    return 1 if report.passed is False or not report.was_tried else 0


def text(report: CheckReport) -> str:
    """Return the text to print: the verdict, the parameters that differ most, and what the bound applies to."""
    colour = "yellow" if report.passed is None else "green" if report.passed else "red"
    verdict = coloured(report.verdict, colour)
    if not report.tensors:
        return verdict
    from shardscope.runtime.tools.check_report import worst_of

    table = worst_of(report, " (--json lists all)")
    about = (
        f"Parameters that differ most. The bound of {report.bound:.0e} applies to each loss and to all parameters as "
        "one vector, not to a single parameter; share is a parameter's part of that vector's difference:"
    )
    rows = aligned(table.header, table.rows)
    return "\n".join([verdict, "", fill(about, 100), rows, *filter(None, [table.more])])


class _Announcer:
    """Callback that prints a line to stderr when each of the check's runs starts."""

    def __init__(self) -> None:
        self._run = ""

    def __call__(self, run: Run, _steps: int) -> None:
        if run.id != self._run:
            self._run = run.id
            ranks = "1 process" if run.job.world_size == 1 else f"{run.job.world_size} ranks"
            print(f"running {run.job.strategy.label} on {ranks} for {run.job.steps} steps", file=sys.stderr)
