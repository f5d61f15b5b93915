"""`shardscope demo`: train the main job with every strategy; print a table, write a report."""

from __future__ import annotations

import argparse
import importlib
from typing import Any


def add_to(commands: Any) -> None:
    """Add this command to the parser's commands; the demo itself parses its arguments."""
    parser = commands.add_parser(
        "demo",
        help="train on 1 and on 4 ranks by every strategy; print a table, write a report",
        add_help=False,
        prefix_chars="\0",  # an option such as --steps belongs to the demo
    )
    parser.add_argument("rest", nargs="*", help=argparse.SUPPRESS)
    parser.set_defaults(carry_out=carry_out)


def carry_out(arguments: argparse.Namespace) -> int:
    """Run the demo, which is in the widgets package since it draws plots."""
    demo = importlib.import_module("shardscope_widgets.demo")
    return demo.main(arguments.rest) or 0
