"""`shardscope demo`: train two small models with every strategy, print a table, and write an HTML report."""

from __future__ import annotations

import argparse
import importlib
from typing import Any


def add_to(commands: Any) -> None:
    """Add this command to the parser's commands; the demo parses its own arguments."""
    parser = commands.add_parser(
        "demo",
        help="train on one process and on 4 ranks with every strategy; print a table, write a report",
        add_help=False,
        prefix_chars="\0",  # leaves options such as --steps to the demo
    )
    parser.add_argument("rest", nargs="*", help=argparse.SUPPRESS)
    parser.set_defaults(carry_out=carry_out)


def carry_out(arguments: argparse.Namespace) -> int:
    """Run the demo, which is part of the widgets package because it draws plots."""
    demo = importlib.import_module("shardscope_widgets.demo")
    return demo.main(arguments.rest) or 0
