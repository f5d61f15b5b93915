"""`shardscope export`: write a run in the file format of another tool."""

from __future__ import annotations

import argparse
from typing import Any

from shardscope.commands._json import as_json
from shardscope.commands._runs import add_run_argument, attach
from shardscope.runtime.export import FORMATS

_FILE = {"chrome-trace": ".json", "pt": ".pt", "safetensors": ".safetensors"}


def add_to(commands: Any) -> None:
    """Add this command to the parser's commands."""
    parser = commands.add_parser(
        "export",
        help="write a run, or its weights, in the format of another tool: Parquet, safetensors, ...",
    )
    add_run_argument(parser)
    written = "; ".join(f"{name}: {about}" for name, (_, about) in FORMATS.items())
    parser.add_argument("--format", required=True, choices=FORMATS, help=written)
    parser.add_argument(
        "--to",
        metavar="PATH",
        help="file or folder, or URI of an MLflow server (default: in this folder, named after the run)",
    )
    parser.add_argument("--json", action="store_true", help="print the run, the format and the path as JSON")
    parser.set_defaults(carry_out=carry_out)


def carry_out(arguments: argparse.Namespace) -> int:
    """Write the run in the requested format, and print the path of the result."""
    run = attach(arguments.run, arguments.root)
    form = arguments.format
    written = run.export(arguments.to or f"{run.path.name}-{form}{_FILE.get(form, '')}", format=form)
    print(as_json({"run": run.id, "format": form, "path": written}) if arguments.json else written)
    return 0
