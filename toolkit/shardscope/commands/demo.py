"""`shardscope demo`: train two small models with every strategy, print a table, and write an HTML report."""

from __future__ import annotations

import argparse
import importlib

HELP = "train on one process and on 4 ranks with every strategy; print a table, write a report"
PARSER = {"add_help": False, "prefix_chars": "\0"}  # leaves options such as --steps to the demo


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of this command."""
    parser.add_argument("rest", nargs="*", help=argparse.SUPPRESS)


def carry_out(arguments: argparse.Namespace) -> int:
    """Run the demo, which is part of the widgets package because it draws plots."""
    demo = importlib.import_module("shardscope_widgets.demo")
    return demo.main(arguments.rest) or 0
