"""`shardscope stop`: stop a run on this machine, whichever process started it."""

from __future__ import annotations

import argparse

from shardscope.commands._options import add_run_argument, attach
from shardscope.commands._output import OF_STATE, as_json, coloured
from shardscope.errors import SpecError

HELP = "stop a run at its next step, and keep its records"
JSON = "print the id and the final state as JSON"


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of this command."""
    add_run_argument(parser)
    parser.add_argument(
        "--grace-s", type=float, default=5.0, help="seconds to wait before killing the run (default: 5)"
    )


def carry_out(arguments: argparse.Namespace) -> int:
    """Stop the run, and print its final state; do nothing to a run that has already ended."""
    if not arguments.grace_s >= 0:
        raise SpecError(
            f"--grace-s {arguments.grace_s:g} is not a valid grace period; give seconds, 0 to kill at once"
        )
    run = attach(arguments.run, arguments.root)
    run.stop(grace_s=arguments.grace_s)
    if arguments.json:
        print(as_json({"id": run.id, "state": run.state}))
    else:
        print(f"{run.id}: {coloured(run.state, OF_STATE.get(run.state, 'dim'))}")
    return 0
