"""`shardscope resize`: change the number of ranks of an elastic run while it trains."""

from __future__ import annotations

import argparse
from typing import Any

from shardscope.commands._json import as_json
from shardscope.commands._runs import add_run_argument, attach
from shardscope.spec.units import plural


def add_to(commands: Any) -> None:
    """Add this command to the parser's commands."""
    parser = commands.add_parser(
        "resize",
        help="change the number of ranks of a run while it trains",
        description="Change the number of ranks of a run while it trains. Its job must be elastic, as started with "
        "`shardscope run --elastic 2:8`.",
    )
    add_run_argument(parser)
    parser.add_argument("ranks", type=int, help="new number of ranks")
    parser.add_argument("--json", action="store_true", help="print the id and the number of ranks as JSON")
    parser.set_defaults(carry_out=carry_out)


def carry_out(arguments: argparse.Namespace) -> int:
    """Request the number of ranks; the run goes on with it after the step in progress."""
    run = attach(arguments.run, arguments.root).resize(arguments.ranks)
    if arguments.json:
        print(as_json({"id": run.id, "world_size": arguments.ranks}))
    else:
        print(f"{run.id}: training continues on {plural(arguments.ranks, 'rank')} after the step in progress")
    return 0
