"""`shardscope doctor`: report which features this machine has, and the effect of each missing feature."""

from __future__ import annotations

import argparse

HELP = "report what this machine can do and what is missing"
JSON = "print the findings as JSON"


def carry_out(arguments: argparse.Namespace) -> int:
    """Print the report; return 1 if this machine cannot run jobs."""
    from shardscope.runtime.tools.doctor import doctor

    report = doctor()
    print(report.to_json() if arguments.json else report.to_text())
    return 0 if report.ok else 1
