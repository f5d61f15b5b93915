"""`shardscope run`: a job from options or a file, real ranks, one line of progress, a table at the end."""

from __future__ import annotations

import argparse
import json
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shardscope.commands._job import add_job_options, build_job
from shardscope.commands._progress import Progress, table
from shardscope.commands._signals import Terminated, sigterm_interrupts

if TYPE_CHECKING:
    from shardscope.runtime import Run

POLL_S = 0.1


def add_to(commands: Any) -> None:
    """Add this command to the parser's commands."""
    parser = commands.add_parser(
        "run",
        help="train a job on real ranks",
        description="Train a job on real ranks. Ctrl-C stops it cleanly.",
    )
    add_job_options(parser)
    parser.add_argument("--name", help="name of the run directory")
    parser.add_argument("--root", type=Path, help="folder of the runs (default: $SHARDSCOPE_RUNS or ./runs)")
    parser.add_argument(
        "--resume", help="run whose newest checkpoint to go on from, or the path of a checkpoint"
    )
    parser.add_argument(
        "--allow-pickle", action="store_true",
        help="read a checkpoint of an earlier version, which can run code: only if you trust whoever made it",
    )  # fmt: skip
    parser.add_argument("--json", action="store_true", help="print the result as JSON and no progress")
    parser.set_defaults(carry_out=carry_out)


def carry_out(arguments: argparse.Namespace) -> int:
    """Launch, watch to the end, print the table."""
    job = build_job(arguments)  # refused before anything slow is imported

    from shardscope.runtime import launch

    run = launch(job, root=arguments.root, resume=arguments.resume, allow_pickle=arguments.allow_pickle)
    try:
        with sigterm_interrupts():
            watch(run, Progress(job.last_step, job.world_size, quiet=arguments.json))
            run.wait()
    except KeyboardInterrupt as interrupt:
        stop(run)
        print(f"stopped; what it recorded is in {run.path}", file=sys.stderr)
        return 143 if isinstance(interrupt, Terminated) else 130
    summary = run.summary()
    if arguments.json:
        print(json.dumps({"id": run.id, "path": str(run.path), **asdict(summary)}, indent=2))
    else:
        print(f"{table(summary)}\n{run.path}")
    return 0


def watch(run: Run, progress: Progress) -> None:
    """Show the run's steps as they are written, until it ends."""
    tail = run.tail()
    while True:
        alive = run.is_alive  # asked before the poll, so that what came last is still read
        progress.feed(tail.poll())
        if not alive:
            break
        time.sleep(POLL_S)
    progress.close()


def stop(run: Run) -> None:
    """Stop at the next step; a second Ctrl-C kills."""
    print("\nstopping at the next step; Ctrl-C again to kill", file=sys.stderr)
    try:
        run.stop()
    except KeyboardInterrupt:
        run.stop(grace_s=0.0)
