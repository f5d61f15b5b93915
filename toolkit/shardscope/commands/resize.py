"""`shardscope resize`: change the number of ranks of an elastic run while it trains."""

from __future__ import annotations

import argparse

from shardscope.commands._options import add_run_argument, attach
from shardscope.commands._output import as_json
from shardscope.spec.units import plural

HELP = "change the number of ranks of a run while it trains"
ABOUT = (
    "Change the number of ranks of a run while it trains. Its job must be elastic, as started with "
    "`shardscope run --elastic 2:8`."
)
JSON = "print the id and the number of ranks as JSON"


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of this command."""
    add_run_argument(parser)
    parser.add_argument("ranks", type=int, help="new number of ranks")


def carry_out(arguments: argparse.Namespace) -> int:
    """Request the number of ranks, with which the run continues after the step in progress."""
    run = attach(arguments.run, arguments.root).resize(arguments.ranks)
    if arguments.json:
        print(as_json({"id": run.id, "world_size": arguments.ranks}))
    else:
        print(f"{run.id}: training continues on {plural(arguments.ranks, 'rank')} after the step in progress")
    return 0
