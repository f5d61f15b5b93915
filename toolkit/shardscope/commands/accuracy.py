"""`shardscope accuracy`: how far the step times were off that were predicted when runs were launched."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from shardscope.commands._json import as_json
from shardscope.commands._runs import ROOT_HELP


def add_to(commands: Any) -> None:
    """Add this command to the parser's commands."""
    parser = commands.add_parser(
        "accuracy",
        help="show how accurate the predictions of your runs have been",
        description="Compare the step time that was predicted when each run was launched with the one it measured: "
        "the median and the largest error, and how many measured times were in the predicted 90%% interval.",
    )
    parser.add_argument(
        "--by", default="strategy", metavar="SETTING",
        help="setting by which to group runs: strategy, model, world_size, cluster, constants or another "
        "(default: strategy)",
    )  # fmt: skip
    parser.add_argument("--group", help="only the runs of this group")
    parser.add_argument("--root", type=Path, metavar="FOLDER", help=ROOT_HELP)
    parser.add_argument("--json", action="store_true", help="print one record per run as JSON")
    parser.set_defaults(carry_out=carry_out)


def carry_out(arguments: argparse.Namespace) -> int:
    """Print the table, and return 0."""
    from shardscope.measure.accuracy import accuracy

    found = accuracy(arguments.root, group=arguments.group)
    print(as_json(found.to_dict()) if arguments.json else found.text(arguments.by))
    return 0
