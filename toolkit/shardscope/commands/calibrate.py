"""`shardscope calibrate`: measure the constants of this machine, or of a cluster emulated on it."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from shardscope.commands._emulated import add_emulation_option, emulated_from
from shardscope.commands._options import add_root, attach, refuse
from shardscope.commands._rows import add_rows_options, given_to_rows, refuse_without_rows
from shardscope.errors import SpecError
from shardscope.runtime.record.bar import is_terminal

HELP = "measure this machine, so that predictions for it are accurate"
ABOUT = (
    "Launch short real runs for less than a minute, and fit to them the constants with which steps of "
    "jobs on this machine are predicted and simulated. They are saved for this user, and later predictions use "
    "them. Run nothing else on the machine in the meantime. With --rows, fit the constants of a GPU "
    "cluster to measured steps. "
    "Layout options apply to all rows; columns of the table override them."
)
JSON = "print the calibration as JSON"


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of this command."""
    add_emulation_option(parser)
    parser.add_argument(
        "--runs",
        nargs="+",
        metavar="RUN",
        help="refine the saved calibration with these runs instead of measuring",
    )
    add_rows_options(parser, purpose="fit a GPU cluster's constants to measured steps")
    add_root(parser)
    parser.add_argument(
        "--output", type=Path, metavar="FILE", help="also write the calibration to this JSON file"
    )
    parser.add_argument(
        "--no-save", action="store_true", help="do not use the calibration for later predictions"
    )


def carry_out(arguments: argparse.Namespace) -> int:
    """Calibrate, print the constants, and return 0."""
    from shardscope.measure.calibrate.entry import calibrate

    if arguments.rows is not None:
        print_rows(arguments)
        return 0
    refuse_without_rows(arguments)
    runs = None if arguments.runs is None else [attach(name, arguments.root) for name in arguments.runs]
    found = calibrate(
        emulated_from(arguments.emulate), runs=runs, save=not arguments.no_save, progress=shown_on(sys.stderr)
    )
    print(found.to_json() if arguments.json else found)
    if arguments.output is not None:
        found.save(arguments.output)
    return 0


def print_rows(arguments: argparse.Namespace) -> None:
    """Calibrate a GPU cluster with measured steps, and print the result."""
    from shardscope.measure.calibrate.entry import calibrate

    why = "cannot be combined with --rows, which describes steps of a GPU cluster; leave one out"
    refuse(arguments, ("emulate", "runs"), why)
    for flag, given in (("--no-save", arguments.no_save), ("--root", arguments.root is not None)):
        if given:
            raise SpecError(
                f"{flag} has no effect with --rows, whose calibration only --output saves; leave it out"
            )
    cluster, model, layout, software = given_to_rows(arguments)
    found = calibrate(cluster, rows=arguments.rows, model=model, layout=layout, software=software)
    print(found.to_json() if arguments.json else found)
    if arguments.output is not None:
        found.save(arguments.output)


def shown_on(stream: Any) -> Any:
    """Return a function that shows the current probe on a terminal, in place; None if the stream is not a terminal."""
    if not is_terminal(stream):
        return None

    def show(number: int, count: int, name: str) -> None:
        end = "\n" if number == count else ""
        stream.write(f"\r\x1b[K{number}/{count}  {name}{end}")
        stream.flush()

    return show
