"""`shardscope accuracy`: errors of the step times that were predicted when runs were launched."""

from __future__ import annotations

import argparse

from shardscope.commands._options import add_root
from shardscope.commands._output import as_json

HELP = "show how accurate the predictions of your runs have been"
ABOUT = (
    "Compare each run's measured step time with the prediction made when it was launched: the median and "
    "the largest error, and how many measured times were inside the 90%% prediction interval."
)
JSON = "print one record per run as JSON"


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of this command."""
    parser.add_argument(
        "--by", default="strategy", metavar="SETTING",
        help="setting by which to group runs: strategy, model, world_size, cluster, constants or another "
        "(default: strategy)",
    )  # fmt: skip
    parser.add_argument("--group", help="only the runs of this group")
    add_root(parser)


def carry_out(arguments: argparse.Namespace) -> int:
    """Print the table, and return 0."""
    from shardscope.measure.accuracy import accuracy

    found = accuracy(arguments.root, group=arguments.group)
    print(as_json(found.to_dict()) if arguments.json else found.text(arguments.by))
    return 0
