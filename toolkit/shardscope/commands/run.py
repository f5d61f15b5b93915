"""`shardscope run`: a job from options or a file, real ranks, one line of progress, a table at the end."""

from __future__ import annotations

import argparse
import json
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, NoReturn

from shardscope.commands._progress import Progress, table
from shardscope.errors import SpecError

if TYPE_CHECKING:
    from shardscope.runtime import Run
    from shardscope.spec import Job

POLL_S = 0.1


class _Terminated(KeyboardInterrupt):
    """SIGTERM, which stops a run the way Ctrl-C does."""


def add_to(commands: Any) -> None:
    """Add this command to the parser's commands."""
    parser = commands.add_parser(
        "run",
        help="train a job on real ranks",
        description="Train a job on real ranks. Ctrl-C stops it cleanly.",
    )
    parser.add_argument(
        "--job", type=Path, help="a job.json, such as a run directory holds; options change it"
    )
    parser.add_argument("--model", help="model by name (default: gpt-nano)")
    parser.add_argument("--data", help="data by name, or a path (default: what the model reads)")
    parser.add_argument("--strategy", help="single, all-reduce, ring, ring:2 (default: ring)")
    parser.add_argument("--ranks", type=int, dest="world_size", help="number of ranks (default: 2)")
    parser.add_argument("--optimizer", help="sgd, nesterov, adamw, lamb, lars (default: adamw)")
    parser.add_argument("--lr", type=float, help="learning rate (default: the optimizer's own)")
    parser.add_argument("--batch", type=int, help="samples a step, over all ranks (default: 64)")
    parser.add_argument(
        "--micro-batch", type=int, help="samples a forward pass on one rank (default: all its share)"
    )
    parser.add_argument("--precision", help="fp32, fp64, bf16, fp16 (default: fp32)")
    parser.add_argument("--recompute", help="none, selective, full (default: none)")
    parser.add_argument("--steps", type=int, help="optimizer steps (default: 100)")
    parser.add_argument("--seed", type=int, help="seed of weights and data order (default: 0)")
    parser.add_argument("--name", help="name of the run directory")
    parser.add_argument("--root", type=Path, help="folder of the runs (default: $SHARDSCOPE_RUNS or ./runs)")
    parser.add_argument("--json", action="store_true", help="print the result as JSON and no progress")
    parser.set_defaults(carry_out=carry_out)


def carry_out(arguments: argparse.Namespace) -> int:
    """Launch, watch to the end, print the table."""
    job = build_job(arguments)  # refused before anything slow is imported

    from shardscope.runtime import launch

    run = launch(job, root=arguments.root)
    try:
        with _sigterm_interrupts():
            watch(run, Progress(job.steps, job.world_size, quiet=arguments.json))
            run.wait()
    except KeyboardInterrupt as interrupt:
        stop(run)
        print(f"stopped; what it recorded is in {run.path}", file=sys.stderr)
        return 143 if isinstance(interrupt, _Terminated) else 130
    summary = run.summary()
    if arguments.json:
        print(json.dumps({"id": run.id, "path": str(run.path), **asdict(summary)}, indent=2))
    else:
        print(f"{table(summary)}\n{run.path}")
    return 0


def build_job(arguments: argparse.Namespace) -> Job:
    """The job that the options describe, alone or as changes to a file.

    Raises:
        SpecError: The file cannot be read, or no such job can exist.
    """
    from shardscope.spec import Batch, Job, Optimizer

    base = _read_job(arguments.job) if arguments.job else None
    names = ("model", "data", "strategy", "world_size", "precision", "recompute", "steps", "seed", "name")
    fields = {name: getattr(arguments, name) for name in names if getattr(arguments, name) is not None}
    if arguments.optimizer is not None or arguments.lr is not None:
        same = base is not None and arguments.optimizer in {None, base.optimizer.name}
        start = (
            base.optimizer if base is not None and same else Optimizer(name=arguments.optimizer or "adamw")
        )
        fields["optimizer"] = start if arguments.lr is None else start.replace(lr=arguments.lr)
    if arguments.batch is not None or arguments.micro_batch is not None:
        start_batch = base.batch if base is not None else Batch()
        sizes = {"global_size": arguments.batch, "micro_size": arguments.micro_batch}
        fields["batch"] = start_batch.replace(
            **{name: size for name, size in sizes.items() if size is not None}
        )
    if base is not None:
        return base.replace(**fields)
    fields.setdefault("model", "gpt-nano")
    fields.setdefault("data", _data_for(fields["model"]))
    return Job(**fields)


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


def _read_job(path: Path) -> Job:
    from shardscope.spec import Job

    try:
        return Job.from_json(path.read_text())
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "it is not text"
        raise SpecError(f"job={str(path)!r} cannot be read ({reason}); name a job.json") from None


def _data_for(model: str) -> str:
    from shardscope.spec.models import model_config

    return "digits" if model_config(model).reads == "images" else "python-source"


@contextmanager
def _sigterm_interrupts() -> Iterator[None]:
    def interrupt(_signal: int, _frame: FrameType | None) -> NoReturn:
        raise _Terminated

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
