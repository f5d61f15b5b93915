"""`shardscope reproduce`: train the job of a run again, and compare the losses bit by bit."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from shardscope.commands._job import with_code
from shardscope.commands.run import follow


def add_to(commands: Any) -> None:
    """Add this command to the parser's commands."""
    parser = commands.add_parser(
        "reproduce",
        help="train the job of a run again, and compare the losses",
        description="Train the job of a run again and compare the losses bit by bit. Exit status 1 if they differ.",
    )
    parser.add_argument("run", help="a run's id, as `shardscope runs` lists it, or its path")
    parser.add_argument("--root", type=Path, help="folder of the runs (default: $SHARDSCOPE_RUNS or ./runs)")
    parser.add_argument(
        "--trust-code", action="store_true", help="load the user's functions beside job.json, which runs them"
    )
    parser.add_argument("--json", action="store_true", help="print the result as JSON and no progress")
    parser.set_defaults(carry_out=carry_out)


def carry_out(arguments: argparse.Namespace) -> int:
    """Launch the job, show its progress to the end, and print the step from which the losses differ.

    Returns 1 if they differ.
    """
    from shardscope.runtime import Run, launch
    from shardscope.runtime.reproduce import differences, first_difference

    earlier = Run.attach(arguments.run, arguments.root)
    job = with_code(earlier.job, earlier.path / "job.json", trust_code=arguments.trust_code)
    found = list(differences(earlier))
    for difference in found:
        print(f"shardscope: {difference}", file=sys.stderr)
    run = launch(job, root=arguments.root)
    status = follow(run, quiet=arguments.json)
    if status is not None:
        return status
    step = first_difference(earlier, run)
    if arguments.json:
        told = {"id": run.id, "path": str(run.path), "first_difference": step, "environment": found}
        print(json.dumps(told, indent=2))
    else:
        print("the losses are bit-identical" if step is None else f"the losses differ from step {step} on")
        print(run.path)
    return 0 if step is None else 1
