"""`shardscope export`: write a run in the file format of another tool."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

FORMATS = ("parquet", "chrome-trace", "tensorboard", "wandb", "mlflow")
_FILE = {"chrome-trace": ".json"}


def add_to(commands: Any) -> None:
    """Add this command to the parser's commands."""
    parser = commands.add_parser(
        "export", help="write a run for another tool: Parquet, Chrome trace, TensorBoard, ..."
    )
    parser.add_argument("run", help="a run's id, as `shardscope runs` lists it, or its path")
    parser.add_argument("--format", required=True, choices=FORMATS)
    parser.add_argument(
        "--to",
        metavar="PATH",
        help="file or folder, or URI of an MLflow server (default: named after the run, here)",
    )
    parser.add_argument("--root", type=Path, help="folder of the runs (default: $SHARDSCOPE_RUNS or ./runs)")
    parser.set_defaults(carry_out=carry_out)


def carry_out(arguments: argparse.Namespace) -> int:
    """Write the run, and print the path that was written."""
    from shardscope.runtime import Run

    run = Run.attach(arguments.run, arguments.root)
    form = arguments.format
    print(run.export(arguments.to or f"{run.path.name}-{form}{_FILE.get(form, '')}", format=form))
    return 0
