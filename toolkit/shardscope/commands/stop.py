"""`shardscope stop`: stop a run that was started anywhere on this machine."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from shardscope.errors import SpecError


def add_to(commands: Any) -> None:
    """Add this command to the parser's commands."""
    parser = commands.add_parser("stop", help="stop a run at its next step; all that it recorded is kept")
    parser.add_argument("run", help="a run's id, as `shardscope runs` lists it, or its path")
    parser.add_argument("--root", type=Path, help="folder of the runs (default: $SHARDSCOPE_RUNS or ./runs)")
    parser.add_argument("--grace-s", type=float, default=5.0, help="seconds until it is killed (default: 5)")
    parser.set_defaults(carry_out=carry_out)


def carry_out(arguments: argparse.Namespace) -> int:
    """Stop the run; no error if it has already ended."""
    if not arguments.grace_s >= 0:
        raise SpecError(
            f"--grace-s {arguments.grace_s:g} is not a valid grace period; give seconds, 0 to kill at once"
        )

    from shardscope.runtime import Run

    run = Run.attach(arguments.run, arguments.root)
    run.stop(grace_s=arguments.grace_s)
    print(f"{run.id}: {run.state}")
    return 0
