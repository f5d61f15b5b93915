"""`shardscope report`: write an HTML report on runs, with findings, figures and settings."""

from __future__ import annotations

import argparse
import importlib
from pathlib import Path
from typing import TYPE_CHECKING

from shardscope.commands._options import add_root, attach
from shardscope.commands._output import as_json
from shardscope.errors import SpecError

if TYPE_CHECKING:
    from shardscope.runtime import Run


HELP = "write an HTML report on runs: findings, figures, settings, predictions"
ABOUT = "Write a report on runs as one HTML file that needs no network and no server."
JSON = "print the path and the findings as JSON"


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of this command."""
    parser.add_argument(
        "runs",
        metavar="RUN",
        nargs="*",
        help="ids or paths of runs (default: all runs in the folder, oldest first)",
    )
    add_root(parser)
    parser.add_argument(
        "--to",
        type=Path,
        metavar="PATH",
        default=Path("shardscope-report.html"),
        help="the file (default: %(default)s)",
    )
    parser.add_argument(
        "--title", default="Shardscope report", help="heading of the page (default: %(default)s)"
    )
    parser.add_argument(
        "--predicted",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="also compare each run with its prediction, which takes a second or two per job",
    )


def carry_out(arguments: argparse.Namespace) -> int:
    """Write the report, and print its findings and its path."""
    chosen = _runs(arguments)
    report = importlib.import_module("shardscope_widgets.report")
    path, findings = report.report_on(
        chosen, arguments.to, title=arguments.title, is_predicted=arguments.predicted
    )
    if arguments.json:
        print(as_json({"path": str(path.resolve()), "findings": findings}))
    else:
        print("\n".join([*findings, str(path.resolve())]))
    return 0


def _runs(arguments: argparse.Namespace) -> list[Run]:
    from shardscope.runtime import runs

    if arguments.runs:
        return [attach(name, arguments.root) for name in dict.fromkeys(arguments.runs)]
    found = list(reversed(runs(arguments.root)))
    if not found:
        raise SpecError("there are no runs to report on; start one with: shardscope run")
    return found
