"""`shardscope stop`: stop a run on this machine, whichever process started it."""

from __future__ import annotations

import argparse
from typing import Any

from shardscope.commands._colour import OF_STATE, coloured
from shardscope.commands._json import as_json
from shardscope.commands._runs import add_run_argument, attach
from shardscope.errors import SpecError


def add_to(commands: Any) -> None:
    """Add this command to the parser's commands."""
    parser = commands.add_parser("stop", help="stop a run at its next step, and keep its records")
    add_run_argument(parser)
    parser.add_argument(
        "--grace-s", type=float, default=5.0, help="seconds to wait before killing the run (default: 5)"
    )
    parser.add_argument("--json", action="store_true", help="print the id and the final state as JSON")
    parser.set_defaults(carry_out=carry_out)


def carry_out(arguments: argparse.Namespace) -> int:
    """Stop the run, and print its final state; a run that has already ended is left as it is."""
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
