"""`shardscope reproduce`: train the job of a run again, and compare the losses bit by bit."""

from __future__ import annotations

import argparse
import sys
import warnings

from shardscope.commands._job import if_trusted
from shardscope.commands._options import add_run_argument, attach
from shardscope.commands._output import as_json
from shardscope.commands.run import follow

HELP = "train the job of a run again, and compare the losses"
ABOUT = "Train the job of a run again and compare the losses bit by bit. Exit status 1 if they differ."
JSON = "print the result as JSON and no progress"


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of this command."""
    add_run_argument(parser)
    parser.add_argument(
        "--trust-code",
        action="store_true",
        help="load the user's functions saved next to job.json; this runs their code",
    )


def carry_out(arguments: argparse.Namespace) -> int:
    """Launch the run's job again, show its progress, and print the first step at which the losses differ.

    Return 1 if a loss differs.
    """
    from shardscope.runtime.tools.reproduce import (
        EnvironmentDiffers,
        differences,
        first_difference,
        reproduce,
    )

    earlier = attach(arguments.run, arguments.root)
    found = list(differences(earlier))
    for difference in found:
        print(f"shardscope: {difference}", file=sys.stderr)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", EnvironmentDiffers)  # printed above
        run = if_trusted(
            lambda is_trusted: reproduce(earlier, trust_code=is_trusted, root=arguments.root),
            trust_code=arguments.trust_code,
        )
    status = follow(run, quiet=arguments.json)
    if status is not None:
        return status
    step = first_difference(earlier, run)
    if arguments.json:
        told = {"id": run.id, "path": str(run.path), "first_difference": step, "environment": found}
        print(as_json(told))
    else:
        print("the losses are bit-identical" if step is None else f"the losses differ from step {step} on")
        print(run.path)
    return 0 if step is None else 1
