"""The entry point of a rank. The same under a notebook's agent, under `torchrun` and on several machines.

    python -m shardscope.runtime.worker --job job.json --run-dir DIR        (under torchrun)

`main` is what the agent starts. A rank reads the job from the run directory, joins the group its environment
describes, trains, and leaves its events there. A failure is written as an event before the process ends.
"""

from __future__ import annotations

import argparse
import errno
import os
import sys
import time
import traceback
from pathlib import Path

import torch

from shardscope.errors import ShardscopeError
from shardscope.runtime.consequence import is_consequence
from shardscope.runtime.control import StopControl
from shardscope.runtime.processes import die_with_parent, exit_with_agent, ignore_interrupts, process_started
from shardscope.runtime.rundir import RunDir
from shardscope.runtime.summary import write_summary
from shardscope.spec import Job
from shardscope.training.context import open_rank
from shardscope.training.events import EventWriter
from shardscope.training.trainer import Trainer

_COURTESY_S = 0.5
"""How long a rank that was only left alone stays: once one has ended, the agent ends all, and the one that knows why
may still be about to say it."""


def main(path: str, resume: str | None = None) -> str:
    """Train one rank of the run at `path`; returns the state it ended in. Never returns after a failure."""
    ignore_interrupts()
    exit_with_agent()
    return _work(RunDir(Path(path)), resume)


def _work(run: RunDir, resume: str | None) -> str:
    rank = int(os.environ["RANK"])
    try:
        with EventWriter(run.rank_file(rank), rank) as events:
            events.emit(
                "process", pid=os.getpid()
            )  # tells whose exit code is whose, also before training starts
            return _train(run, resume, events)
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
        sys.stdout.flush()
        os._exit(1)  # a peer may be stuck inside the backend; do not wait for its threads


def _train(run: RunDir, resume: str | None, events: EventWriter) -> str:
    trainer: Trainer | None = None
    try:
        job = run.read_job(with_code=True)
        torch.set_num_threads(job.threads)
        with open_rank(job, events) as context:
            trainer = Trainer(job, context, run.path)
            if resume:
                trainer.resume(Path(resume) / "checkpoints")
            drift = job.strategy.drift(context.world_size)
            control = StopControl(run, context.rank, context.world_size, drift, job.timeout_s)
            return trainer.train(control, evaluated=control.evaluated)
    except BaseException as error:
        if _is_disk_full(error):
            run.release_reserve()
        described = _describe(error, trainer)
        events.emit("error", **described)
        if is_consequence(described):
            time.sleep(_COURTESY_S)
        raise


def _describe(error: BaseException, trainer: Trainer | None) -> dict[str, object]:
    own = isinstance(error, ShardscopeError) or _is_disk_full(error)
    advice = (
        "; free some space, or set SHARDSCOPE_RUNS to a folder on another disk"
        if _is_disk_full(error)
        else ""
    )
    return {
        "step": trainer.context.meter.step if trainer else 0,
        "strategy": trainer.job.strategy.label if trainer else None,
        "type": type(error).__name__,
        "message": f"{error}{advice}",
        "traceback": "" if own else "".join(traceback.format_exception(error)),
    }


def _is_disk_full(error: BaseException) -> bool:
    if isinstance(error, OSError):
        return error.errno in (errno.ENOSPC, errno.EDQUOT)
    return os.strerror(errno.ENOSPC) in str(error)  # as a checkpoint's writers report it


def _under_torchrun() -> None:
    parser = argparse.ArgumentParser(
        prog="shardscope.runtime.worker", description="One rank, under torchrun."
    )
    parser.add_argument("--job", type=Path, required=True, help="job.json")
    parser.add_argument(
        "--run-dir", type=Path, required=True, help="where events go; the same on every machine"
    )
    parser.add_argument("--resume", type=Path, help="run directory whose newest checkpoint to go on from")
    options = parser.parse_args()
    die_with_parent()
    run, rank = RunDir(options.run_dir.absolute()), int(os.environ["RANK"])
    job = _for_this_world(Job.from_json(options.job.read_text()))
    if rank == 0 and run.read_status() is not None:
        parser.error(
            f"--run-dir {run.path} already holds a run; give a new one (--resume goes on from an old one)"
        )
    if int(os.environ.get("LOCAL_RANK", "0")) == 0:
        run.path.mkdir(parents=True, exist_ok=True, mode=0o700)
        run.write_job(job)
        if rank == 0:
            run.write_status("running", pid=os.getpid(), process_started=process_started())
    state = _wait_then_work(run, str(options.resume) if options.resume else None)
    if rank == 0:
        run.write_status(state, pid=os.getpid(), process_started=process_started())
        write_summary(run, state)


def _for_this_world(job: Job) -> Job:
    world_size = int(os.environ["WORLD_SIZE"])
    return job if job.world_size == world_size else job.replace(world_size=world_size)


def _wait_then_work(run: RunDir, resume: str | None) -> str:
    deadline = time.monotonic() + 60
    while not (run.path / "job.json").is_file():
        if time.monotonic() > deadline:
            raise TimeoutError(
                f"{run.path} did not appear within 60 s; the first rank of this machine writes it"
            )
        time.sleep(0.02)
    return _work(run, resume)


if __name__ == "__main__":
    _under_torchrun()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(
        0
    )  # as under our agent: threads inside the backend may not outlive the interpreter, and abort the process
