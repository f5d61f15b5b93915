"""`shardscope run`: train a job from options or a file on real ranks; one line of progress, a table at the end."""

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
from shardscope.errors import SpecError

if TYPE_CHECKING:
    from shardscope.runtime import Run
    from shardscope.spec import Job

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
        "--resume", help="run whose newest checkpoint to resume from, or the path of a checkpoint"
    )
    parser.add_argument(
        "--allow-pickle", action="store_true",
        help="read a checkpoint from an earlier version, which can run code: only if you trust whoever made it",
    )  # fmt: skip
    parser.add_argument(
        "--predict",
        action="store_true",
        help="predict what ranks send, how much memory they need and how long it takes; train nothing",
    )
    parser.add_argument(
        "--cluster",
        help="with --predict: a device or a node from the catalogue, for example h100 (default: this machine)",
    )
    parser.add_argument("--nodes", type=int, help="with --cluster: number of nodes (default: 1)")
    parser.add_argument(
        "--per-node", type=int, help="with --cluster: devices per node (default: the standard node's)"
    )
    parser.add_argument(
        "--tokens", type=float, help="with --predict: also hours and dollars to train on this many tokens"
    )
    parser.add_argument(
        "--anyway",
        action="store_true",
        help="train even if the job is predicted not to fit in this machine's memory",
    )
    parser.add_argument("--json", action="store_true", help="print the result as JSON and no progress")
    parser.set_defaults(carry_out=carry_out)


def carry_out(arguments: argparse.Namespace) -> int:
    """Launch the job, show its progress to the end, and print the table."""
    job = build_job(arguments)  # reports errors before the slow imports
    if arguments.predict:
        return _predict(job, arguments)
    _refuse_options_of_predict(arguments)

    from shardscope.runtime import launch
    from shardscope.runtime.preflight import preflight

    found = preflight(job)
    if not arguments.json:
        print(found, file=sys.stderr)
    if not arguments.anyway:
        found.require_fits("train it all the same with --anyway")
    run = launch(
        job,
        root=arguments.root,
        resume=arguments.resume,
        allow_pickle=arguments.allow_pickle,
        preflight=False,
    )
    status = follow(run, quiet=arguments.json)
    if status is not None:
        return status
    summary = run.summary()
    if arguments.json:
        print(json.dumps({"id": run.id, "path": str(run.path), **asdict(summary)}, indent=2))
    else:
        print(f"{table(summary)}\n{run.path}")
    return 0


def follow(run: Run, *, quiet: bool) -> int | None:
    """Show a run's progress to its end; return None, or the exit status if an interrupt stopped it.

    Raises:
        RunFailed: A rank failed.
    """
    try:
        with sigterm_interrupts():
            watch(run, Progress(run.job.last_step, run.job.world_size, quiet=quiet))
            run.wait()
    except KeyboardInterrupt as interrupt:
        stop(run)
        print(f"stopped; what it recorded is in {run.path}", file=sys.stderr)
        return 143 if isinstance(interrupt, Terminated) else 130
    return None


def _predict(job: Job, arguments: argparse.Namespace) -> int:
    """Print the prediction; return 1 if the job does not fit in memory."""
    from shardscope.commands.predict import for_tokens
    from shardscope.prediction.job import predict_job
    from shardscope.spec.cluster import Cluster

    cluster = None
    if arguments.cluster is not None:
        cluster = Cluster.of(arguments.cluster, nodes=arguments.nodes or 1, per_node=arguments.per_node)
    found = predict_job(job, cluster)
    if arguments.json:
        print(json.dumps({**found.to_dict(), **for_tokens(found, arguments.tokens)}, indent=2))
    else:
        print(found)
        for name, value in for_tokens(found, arguments.tokens).items():
            print(f"{name}: {value:.4g}")
    return 1 if found.fits is False else 0


def _refuse_options_of_predict(arguments: argparse.Namespace) -> None:
    for option in ("cluster", "nodes", "per_node", "tokens"):
        if getattr(arguments, option) is not None:
            flag = f"--{option.replace('_', '-')}"
            raise SpecError(f"{flag} has no effect without --predict; add it, or leave {flag} out")


def watch(run: Run, progress: Progress) -> None:
    """Show the run's steps as they are recorded, until it ends."""
    tail = run.tail()
    while True:
        alive = run.is_alive  # read before the poll, so that the last events are not missed
        progress.feed(tail.poll())
        if not alive:
            break
        time.sleep(POLL_S)
    progress.close()


def stop(run: Run) -> None:
    """Stop the run at its next step; a second Ctrl-C kills it."""
    print("\nstopping at the next step; Ctrl-C again to kill", file=sys.stderr)
    try:
        run.stop()
    except KeyboardInterrupt:
        run.stop(grace_s=0.0)
