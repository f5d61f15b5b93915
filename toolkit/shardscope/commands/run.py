"""`shardscope run`: train a job on real ranks, with a progress line during the run and a table at its end."""

from __future__ import annotations

import argparse
import sys
import time
from dataclasses import asdict
from typing import TYPE_CHECKING

from shardscope.commands._emulated import add_emulation_option, build_emulated
from shardscope.commands._job import add_job_options, build_job
from shardscope.commands._options import add_cluster_options, add_root, build_cluster, refuse
from shardscope.commands._output import as_json
from shardscope.commands._progress import Progress, table
from shardscope.commands._signals import Terminated, sigterm_interrupts
from shardscope.errors import SpecError
from shardscope.runlog.reducer import RunLog
from shardscope.spec.fault_kinds import KINDS

if TYPE_CHECKING:
    from shardscope.runtime import Run
    from shardscope.spec import Job
    from shardscope.spec.cluster import EmulatedCluster

POLL_S = 0.1


HELP = "train a job on real ranks"
ABOUT = "Train a job on real ranks. Ctrl-C stops it cleanly."
JSON = "print the result as JSON and no progress"


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of this command."""
    add_job_options(parser)
    parser.add_argument("--name", help="name of the run directory")
    parser.add_argument(
        "--group",
        help="group of runs with which it is compared (default: the model and its data); not part of the job",
    )
    add_root(parser)
    parser.add_argument(
        "--resume",
        help="run to resume from its newest checkpoint, or the path of a checkpoint; a run that was on an emulated "
        "cluster resumes on an equal one, unless --emulate is given",
    )
    parser.add_argument(
        "--faults",
        help="faults to inject, such as 'kill rank=1 step=40; slow rank=0 factor=3 steps=10-20', or a faults.json; "
        f"the kinds are {', '.join(KINDS)}",
    )
    parser.add_argument(
        "--predict",
        action="store_true",
        help="predict the bytes that ranks send, their memory and the step time, instead of training",
    )
    add_cluster_options(parser, only_with="with --predict: ")
    add_emulation_option(parser)
    parser.add_argument(
        "--tokens", type=float, help="with --predict: also hours and dollars to train on this many tokens"
    )
    parser.add_argument(
        "--anyway",
        action="store_true",
        help="train even if the job is predicted not to fit in this machine's memory",
    )


def carry_out(arguments: argparse.Namespace) -> int:
    """Launch the job, show its progress, and print its summary; with ``--predict``, only print the prediction."""
    cluster = build_emulated(arguments)
    job = build_job(arguments)  # reports errors before the slow imports
    if arguments.predict:
        return _predict(job, arguments, cluster)
    why = "has no effect without --predict; add --predict, or leave {flag} out"
    refuse(arguments, ("cluster", "nodes", "per_node", "tokens"), why)

    from shardscope.runtime import launch
    from shardscope.runtime.launcher.preflight import preflight
    from shardscope.runtime.record.card import recovery_facts
    from shardscope.runtime.record.rundir import faults_from

    faults = faults_from(arguments.faults)
    faults.check(job, cluster)
    found = preflight(job, cluster)
    if not arguments.json:
        print(found, file=sys.stderr)
    if found.memory is not None and not arguments.anyway:
        found.memory.require_fits("train anyway with --anyway")
    run = launch(
        job,
        None if arguments.emulate is None else cluster or "this machine",
        root=arguments.root,
        resume=arguments.resume,
        faults=faults,
        preflight=False,
        group=arguments.group,
    )
    status = follow(run, quiet=arguments.json)
    if status is not None:
        return status
    summary = run.summary()
    if arguments.json:
        print(as_json({"id": run.id, "path": str(run.path), **asdict(summary)}))
    else:
        facts = recovery_facts(summary)
        recovered = [
            f"{run.state_text}; {', '.join(f'{name} {text}' for name, text in facts.items())}"
        ] * bool(facts)
        print("\n".join([table(summary), *recovered, str(run.path)]))
    return 0


def follow(run: Run, *, quiet: bool) -> int | None:
    """Show a run's progress until it ends; return the exit status if the user interrupted it, else None.

    Raises:
        RunFailed: A rank failed.
    """
    try:
        with sigterm_interrupts():
            watch(run, Progress(run.job.last_step, RunLog.of(run.job), quiet=quiet))
            run.wait()
    except KeyboardInterrupt as interrupt:
        stop(run)
        print(f"stopped; the run's records are in {run.path}", file=sys.stderr)
        return 143 if isinstance(interrupt, Terminated) else 130
    return None


def _predict(job: Job, arguments: argparse.Namespace, emulated: EmulatedCluster | None) -> int:
    """Print the prediction for the job; return 1 if the job does not fit in memory."""
    from shardscope.commands.predict import for_tokens
    from shardscope.prediction.job import predict_job

    cluster = build_cluster(arguments)
    if emulated is not None and cluster is not None:
        raise SpecError("--cluster and --emulate both say where the job runs; give one of them")
    found = predict_job(job, cluster or emulated)
    if arguments.json:
        print(as_json({**found.to_dict(), **for_tokens(found, arguments.tokens)}))
    else:
        print(found)
        for name, value in for_tokens(found, arguments.tokens).items():
            print(f"{name}: {value:.4g}")
    return 1 if found.fits is False else 0


def watch(run: Run, progress: Progress) -> None:
    """Update the progress line as the run records steps, until the run ends."""
    tail = run.tail()
    while True:
        alive = run.is_alive  # read before polling, so that the last events are not missed
        progress.feed(tail.poll())
        if not alive:
            break
        time.sleep(POLL_S)
    progress.close()


def stop(run: Run) -> None:
    """Stop the run at its next step; a second Ctrl-C kills the run."""
    print("\nstopping at the next step; Ctrl-C again to kill", file=sys.stderr)
    try:
        run.stop()
    except KeyboardInterrupt:
        run.stop(grace_s=0.0)
