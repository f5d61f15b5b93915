"""Runs named on the command line: the arguments, and an error that suggests the nearest run and how to list all."""

from __future__ import annotations

import argparse
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING

from shardscope.errors import RunNotFound, RunUnreadable, quoted

if TYPE_CHECKING:
    from shardscope.runtime import Run

ROOT_HELP = "folder of the runs (default: $SHARDSCOPE_RUNS or ./runs)"


def add_run_argument(parser: argparse.ArgumentParser) -> None:
    """Add the argument RUN and the option ``--root``."""
    parser.add_argument("run", metavar="RUN", help="a run's id, as `shardscope runs` lists it, or its path")
    parser.add_argument("--root", type=Path, metavar="FOLDER", help=ROOT_HELP)


def attach(name: str, root: Path | None) -> Run:
    """Return the run with this id or path.

    Raises:
        RunNotFound: There is none; the message suggests the nearest id, and the command that lists all runs.
        RunUnreadable: The run exists but is damaged, or private to another user.
    """
    from shardscope.runtime import Run, runs

    try:
        return Run.attach(name, root)
    except RunUnreadable:
        raise
    except RunNotFound:
        known = [run.id for run in runs(root)]
    containing = [each for each in known if name.lower() in each.lower()]
    near = containing[:1] or get_close_matches(name, known, n=1, cutoff=0.5)
    hint = f"did you mean {near[0]}? " if near else ""
    where = "" if root is None else f" --root {root}"
    raise RunNotFound(f"no run {quoted(name)}; {hint}`shardscope runs{where}` lists all runs")
