"""`shardscope export`: write a run in the file format of another tool."""

from __future__ import annotations

import argparse

from shardscope.commands._options import add_run_argument, attach
from shardscope.commands._output import as_json
from shardscope.runtime.export import FORMATS

_FILE = {"chrome-trace": ".json", "pt": ".pt", "safetensors": ".safetensors"}


HELP = "write a run, or its weights, in the format of another tool: Parquet, safetensors, ..."
JSON = "print the run, the format and the path as JSON"


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of this command."""
    add_run_argument(parser)
    written = "; ".join(f"{name}: {about}" for name, (_, about) in FORMATS.items())
    parser.add_argument("--format", required=True, choices=FORMATS, help=written)
    parser.add_argument(
        "--to",
        metavar="PATH",
        help="file or folder, or URI of an MLflow server (default: in this folder, named after the run)",
    )


def carry_out(arguments: argparse.Namespace) -> int:
    """Write the run in the requested format, and print the path of the result."""
    run = attach(arguments.run, arguments.root)
    form = arguments.format
    written = run.export(arguments.to or f"{run.path.name}-{form}{_FILE.get(form, '')}", format=form)
    print(as_json({"run": run.id, "format": form, "path": written}) if arguments.json else written)
    return 0
