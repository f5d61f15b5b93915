"""The options that describe a table of measured steps, and the settings that they set for all of its rows."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from shardscope.commands._fields import given_fields
from shardscope.commands._options import add_layout_options, add_software_option, named_model, refuse
from shardscope.errors import SpecError
from shardscope.spec.layout import Layout

if TYPE_CHECKING:
    from shardscope.measure.calibrate.tables import Given

_OF_ROWS = ("model", "device", "software", "seq")


def add_rows_options(parser: argparse.ArgumentParser, *, purpose: str) -> None:
    """Add the option that names a table of measured steps, and options for settings that all of its rows share."""
    parser.add_argument(
        "--rows",
        type=Path,
        metavar="FILE",
        help=f"{purpose}: a CSV or JSON file, or a log of Megatron or torchtitan",
    )
    parser.add_argument("--model", help="with --rows: the model, unless they name it")
    parser.add_argument("--device", help="with --rows: the device or node type, unless they name it")
    add_software_option(parser)
    add_layout_options(parser)


def refuse_without_rows(arguments: argparse.Namespace, *, instead: str = "") -> None:
    """Raise an error if an option that needs rows is given without ``--rows``.

    Args:
        arguments: The parsed arguments.
        instead: The given option that does not use rows, such as ``--memory``; empty if there is none.
    """
    why = f"with {instead}; leave" if instead else "without --rows; add --rows FILE, or leave"
    refuse(arguments, (*_OF_ROWS, *given_fields(arguments, Layout)), f"has no effect {why} it out")


def given_to_rows(arguments: argparse.Namespace) -> Given:
    """Return the settings that the options set for all rows."""
    from shardscope.measure.calibrate.tables import Given
    from shardscope.spec.cluster import Cluster

    if arguments.seq is not None and arguments.model is None:
        raise SpecError("--seq has no effect without --model; add --model NAME, or a column seq to the rows")
    settings = given_fields(arguments, Layout)
    return Given(
        None if arguments.device is None else Cluster.of(arguments.device),
        None if arguments.model is None else named_model(arguments),
        Layout(**settings) if settings else None,
        arguments.software,
    )
