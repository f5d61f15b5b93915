"""`shardscope compare`: compare a run with its prediction, term by term."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any


def add_to(commands: Any) -> None:
    """Add this command to the parser's commands."""
    parser = commands.add_parser(
        "compare",
        help="compare a run with its prediction, term by term",
        description="Compare a run with its prediction for this machine, term by term: bytes and messages by "
        "collective, memory by kind, step time by part. Exit status 1 if a term that is predicted exactly, or within "
        "bounds, differs.",
    )
    parser.add_argument("run", help="path of a run, or its name below the runs' folder")
    parser.add_argument("--root", type=Path, help="folder of the runs (default: $SHARDSCOPE_RUNS or ./runs)")
    parser.add_argument("--json", action="store_true", help="print the comparison as JSON")
    parser.set_defaults(carry_out=carry_out)


def carry_out(arguments: argparse.Namespace) -> int:
    """Print the comparison; return 1 if a term that is predicted exactly, or within bounds, differs."""
    from shardscope.measure.compare.of_run import compare
    from shardscope.runtime import Run

    found = compare(Run.attach(arguments.run, arguments.root))
    print(json.dumps(found.to_dict(), indent=2) if arguments.json else found)
    return 1 if found.disagreeing else 0
