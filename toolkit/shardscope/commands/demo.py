"""`shardscope demo`: the main job by every strategy, a table and a report."""

from __future__ import annotations

import argparse
import importlib
from typing import Any


def add_to(commands: Any) -> None:
    """Add this command to the parser's commands; the demo itself parses what follows its name."""
    parser = commands.add_parser(
        "demo",
        help="train on 1 and on 4 ranks by every strategy; print a table, write a report",
        add_help=False,
        prefix_chars="\0",  # an option such as --steps belongs to the demo
    )
    parser.add_argument("rest", nargs="*", help=argparse.SUPPRESS)
    parser.set_defaults(carry_out=carry_out)


def carry_out(arguments: argparse.Namespace) -> int:
    """Hand over to the demo, which draws and therefore lives among the widgets."""
    demo = importlib.import_module("shardscope_widgets.demo")
    return demo.main(arguments.rest) or 0
