"""`shardscope doctor`: report which features this machine has, and what does not work without the missing ones."""

from __future__ import annotations

import argparse
from typing import Any


def add_to(commands: Any) -> None:
    """Add this command to the parser's commands."""
    parser = commands.add_parser("doctor", help="report what this machine can do and what is missing")
    parser.add_argument("--json", action="store_true", help="print the findings as JSON")
    parser.set_defaults(carry_out=carry_out)


def carry_out(arguments: argparse.Namespace) -> int:
    """Print the report; return 1 if this machine cannot run jobs."""
    from shardscope.runtime.tools.doctor import doctor

    report = doctor()
    print(report.to_json() if arguments.json else report.to_text())
    return 0 if report.ok else 1
