"""`shardscope calibrate`: measure the constants of this machine, or of a cluster emulated on it."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from shardscope.commands._calibration import add_software_option
from shardscope.commands._emulated import add_emulation_option, emulated_from
from shardscope.commands._fields import given_fields
from shardscope.commands._runs import ROOT_HELP, attach
from shardscope.commands.predict import add_layout_options, named_model
from shardscope.errors import SpecError
from shardscope.runtime.bar import is_terminal
from shardscope.spec.layout import Layout

_OF_ROWS = ("model", "device", "software", "seq")


def add_to(commands: Any) -> None:
    """Add this command to the parser's commands."""
    parser = commands.add_parser(
        "calibrate",
        help="measure this machine, so that predictions for it are accurate",
        description="Launch short real runs for less than a minute, and fit to them the constants with which steps of "
        "jobs on this machine are predicted and simulated. They are saved for this user, and later predictions use "
        "them. Keep the machine quiet meanwhile. With --rows, fit the constants of a GPU cluster to measured steps. "
        "The options of a layout are settings of all rows, which their columns override.",
    )
    add_emulation_option(parser)
    parser.add_argument(
        "--runs",
        nargs="+",
        metavar="RUN",
        help="refine the saved calibration with these runs instead of measuring",
    )
    parser.add_argument(
        "--rows",
        type=Path,
        metavar="FILE",
        help="fit a GPU cluster's constants to measured steps: a CSV or JSON file, or a log of Megatron or torchtitan",
    )
    parser.add_argument("--model", help="with --rows: the model, unless they name it")
    parser.add_argument("--device", help="with --rows: the device or node type, unless they name it")
    add_software_option(parser)
    add_layout_options(parser)
    parser.add_argument("--root", type=Path, metavar="FOLDER", help=ROOT_HELP)
    parser.add_argument(
        "--output", type=Path, metavar="FILE", help="also write the calibration to this JSON file"
    )
    parser.add_argument("--no-save", action="store_true", help="do not use it for later predictions")
    parser.add_argument("--json", action="store_true", help="print the calibration as JSON")
    parser.set_defaults(carry_out=carry_out)


def carry_out(arguments: argparse.Namespace) -> int:
    """Calibrate, print the constants, and return 0."""
    from shardscope.measure.calibrate.entry import calibrate

    if arguments.rows is not None:
        print_rows(arguments)
        return 0
    for option in (*_OF_ROWS, *given_fields(arguments, Layout)):
        if getattr(arguments, option) is not None:
            flag = f"--{option.replace('_', '-')}"
            raise SpecError(f"{flag} has no effect without --rows; add --rows FILE, or leave it out")
    runs = None if arguments.runs is None else [attach(name, arguments.root) for name in arguments.runs]
    found = calibrate(
        emulated_from(arguments.emulate), runs=runs, save=not arguments.no_save, progress=_told(sys.stderr)
    )
    print(found.to_json() if arguments.json else found)
    if arguments.output is not None:
        found.save(arguments.output)
    return 0


def print_rows(arguments: argparse.Namespace) -> None:
    """Calibrate a GPU cluster with measured steps, and print the result."""
    from shardscope.measure.calibrate.entry import calibrate
    from shardscope.spec.cluster import Cluster

    for option in ("emulate", "runs"):
        if getattr(arguments, option) is not None:
            raise SpecError(
                f"--{option} cannot be combined with --rows, which are of a GPU cluster; leave one out"
            )
    for flag, given in (("--no-save", arguments.no_save), ("--root", arguments.root is not None)):
        if given:
            raise SpecError(
                f"{flag} has no effect with --rows, whose calibration only --output saves; leave it out"
            )
    if arguments.seq is not None and arguments.model is None:
        raise SpecError("--seq has no effect without --model; add --model NAME, or a column seq to the rows")
    settings = given_fields(arguments, Layout)
    found = calibrate(
        None if arguments.device is None else Cluster.of(arguments.device),
        rows=arguments.rows,
        model=None if arguments.model is None else named_model(arguments),
        layout=Layout(**settings) if settings else None,
        software=arguments.software,
    )
    print(found.to_json() if arguments.json else found)
    if arguments.output is not None:
        found.save(arguments.output)


def _told(stream: Any) -> Any:
    """Return a function that shows the current probe on a terminal, in place."""
    if not is_terminal(stream):
        return None

    def show(number: int, count: int, name: str) -> None:
        end = "\n" if number == count else ""
        stream.write(f"\r\x1b[K{number}/{count}  {name}{end}")
        stream.flush()

    return show
