"""The entry point of a rank, for ranks started by a run's agent or by `torchrun`, on one or several machines.

    python -m shardscope.runtime.worker --job job.json --run-dir DIR        (under torchrun)

The agent calls `main`. A rank reads the job from the run directory, joins the process group described by its
environment, trains, and writes its events to the run directory. A failure is written as an event before the process
ends.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
import traceback
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import torch
import torch.distributed as dist

from shardscope.errors import ShardscopeError
from shardscope.runlog import clock
from shardscope.runlog.writer import EventWriter
from shardscope.runtime.agent.control import StopControl, StoreNotes
from shardscope.runtime.agent.restarts import restart_under_torchrun
from shardscope.runtime.agent.user_modules import UserModules, make_importable
from shardscope.runtime.record.inject import PlanWatch
from shardscope.runtime.record.launch_prediction import at_peak_of
from shardscope.runtime.record.processes import (
    die_with_parent,
    exit_with_agent,
    ignore_interrupts,
    process_started,
)
from shardscope.runtime.record.provenance import record
from shardscope.runtime.record.rundir import RunDir, checkpoints_of, faults_from
from shardscope.runtime.record.secondary_failure import is_secondary_failure
from shardscope.spec import Job
from shardscope.spec.faults import Faults
from shardscope.training.context import RankContext, open_rank
from shardscope.training.disk import advice_on, takes_no_more
from shardscope.training.emulation import Emulation
from shardscope.training.faults import FaultyControl, RankFaults, RankPlace
from shardscope.training.run_replicas import resume_newest
from shardscope.training.trainer import EvaluationError, Trainer

if TYPE_CHECKING:
    from shardscope.spec import Job
    from shardscope.training.checkpoint import Loaded


_COURTESY_S = 0.5
"""Time that a rank waits before it exits, in seconds, if it failed only because another rank had died. As soon as one
rank ends, the agent ends all others, and the rank that failed first may not have written its error yet."""

_UNSHARED = "TORCH_DISABLE_SHARE_RDZV_TCP_STORE"
"""Environment variable that must be set, or agents of torch 2.13 end when a node joins (pytorch/pytorch#135712)."""

_WRITERS = frozenset(
    {"shardscope.runlog.files", "shardscope.runlog.writer", "shardscope.training.parameters"}
)
"""Modules that write into the run directory; they never call user code."""


def main(
    path: str,
    resume: str | None = None,
    code: str | None = None,
    modules: tuple[str, tuple[str, ...]] | None = None,
) -> str:
    """Run one rank of the run at `path` to its end. Return the rank's final state; never return after a failure.

    Args:
        path: The run directory.
        resume: Directory of a run to resume from its newest checkpoint, or a checkpoint; None starts from scratch.
        code: Digest of the user's code, if the job has any.
        modules: Modules in the driver's current folder that the code may import, as the fields of `UserModules`; None
            if there are none.
    """
    ignore_interrupts()
    exit_with_agent()
    clock.adopt(os.environ.get(clock.VARIABLE))
    if modules is not None:
        make_importable(UserModules(*modules))
    start = None if resume is None else Resume(Path(resume))
    return _work(RunDir(Path(path), code), start)


def _work(run: RunDir, resume: Resume | None, job: Job | None = None) -> str:
    rank = int(os.environ["RANK"])
    try:
        with EventWriter(run.rank_file(rank), rank) as events:
            # maps the pid of each process to its rank, even if training does not start
            events.emit("process", pid=os.getpid(), started=process_started(), at_peak=at_peak_of(run))
            return _train(run, resume, events, job)
    except BaseException:  # noqa: BLE001 - nothing above can handle it on a rank
        traceback.print_exc()
        sys.stderr.flush()
        sys.stdout.flush()
        os._exit(1)  # the backend's threads may be stuck; do not wait for them


def _train(run: RunDir, resume: Resume | None, events: EventWriter, job: Job | None) -> str:
    trainer: Trainer | None = None
    try:
        job = job or run.read_job(with_code=True)
        if job.elastic is not None:
            job = job.at_size(int(os.environ["WORLD_SIZE"]))
        torch.set_num_threads(job.threads)
        faults = _faults(run, events)
        with open_rank(job, events, faults=faults) as context:
            trainer = Trainer(job, context, run.path)
            if job.elastic is not None and run.by_torchrun.exists():
                resume = newest_of(run, context, resume)
            source = None if resume is None else resume.checkpoints
            saved = resume_newest(trainer, source)
            if saved is not None:
                announce_resize(run, job, context, saved)
            drift = job.strategy.drift(context.world_size)
            control = StopControl(
                run, context.rank, context.world_size, drift, job.timeout_s, _notes_between_machines(context),
                is_resizable=job.elastic is not None and not run.by_torchrun.exists(),
            )  # fmt: skip
            return trainer.train(
                FaultyControl(control.should_stop, faults),
                evaluated=control.evaluated,
                is_resizing=control.is_resizing,
            )
    except BaseException as error:
        if takes_no_more(error):
            run.release_reserve()
        described = _describe(error, trainer, run)
        events.emit("error", **described)
        if is_secondary_failure(described):
            time.sleep(_COURTESY_S)
        raise


def _faults(run: RunDir, events: EventWriter) -> RankFaults:
    """Return the faults planned for this rank; more may be added while the rank trains."""
    watch = PlanWatch(run)
    plan = watch() or Faults()
    emulation = Emulation.from_env(os.environ)
    place = RankPlace.from_env(os.environ, None if emulation is None else emulation.node)
    return RankFaults(plan, place, run.fault_claims, events, grown=watch)


def _notes_between_machines(context: RankContext) -> StoreNotes | None:
    """Return notes in the store of the process group; None if all ranks are on one machine."""
    if context.group is None or context.local_world_size == context.world_size:
        return None
    return StoreNotes(dist.PrefixStore("notes", context.group.get_group_store()))


def _describe(error: BaseException, trainer: Trainer | None, run: RunDir) -> dict[str, object]:
    advice = advice_on(error) if _is_of_run(error, run) else ""
    own = advice or (isinstance(error, ShardscopeError) and not isinstance(error, EvaluationError))
    return {
        "step": trainer.context.meter.step if trainer else 0,
        "strategy": trainer.job.strategy.label if trainer else None,
        "type": type(error).__name__,
        "message": "; ".join(filter(None, [str(error), *getattr(error, "__notes__", []), advice])),
        "traceback": "" if own else "".join(traceback.format_exception(error)),
    }


def _is_of_run(error: BaseException, run: RunDir) -> bool:
    """Return whether an error is about the run directory, rather than about a file that the user's code uses."""
    name = getattr(error, "filename", None)
    if isinstance(name, str):
        return Path(name).absolute().is_relative_to(run.path)
    frames = (frame for frame, _ in traceback.walk_tb(error.__traceback__))
    return any(frame.f_globals.get("__name__") in _WRITERS for frame in frames)


def _under_torchrun() -> None:
    parser = argparse.ArgumentParser(
        prog="shardscope.runtime.worker", description="One rank, under torchrun."
    )
    parser.add_argument("--job", type=Path, required=True, help="job.json")
    parser.add_argument(
        "--run-dir", type=Path, required=True, help="folder for events; the same on every machine"
    )
    parser.add_argument(
        "--resume", type=Path, help="run directory (resumes from its newest checkpoint) or a checkpoint"
    )
    parser.add_argument("--faults", help="faults to inject, such as 'kill rank=1 step=40', or a faults.json")
    parser.add_argument(
        "--allow-pickle", action="store_true", help="read a pickled checkpoint, which can run code"
    )
    parser.add_argument(
        "--trust-code",
        action="store_true",
        help="load the user's functions stored next to job.json, which runs any code in that file",
    )
    options = parser.parse_args()
    die_with_parent()
    run, rank = RunDir(options.run_dir.absolute()), int(os.environ["RANK"])
    count = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
    try:
        job = _for_this_world(_read_job(options.job, trust_code=options.trust_code))
        faults = faults_from(options.faults)
        faults.check(job, nodes=_num_nodes())
    except ShardscopeError as error:
        parser.error(str(error))
    goes_on = job.elastic is not None and _is_under_way(run)
    if rank == 0 and not (count or goes_on) and run.read_status() is not None:
        parser.error(
            f"--run-dir {run.path} already contains a run; give a new one (--resume resumes from an old one)"
        )
    resume = Resume(options.resume.absolute()) if options.resume else None
    if count:
        source = restart_under_torchrun(run, None if resume is None else str(resume.source), count, rank)
        resume = None if source.resume is None else Resume(Path(source.resume))
    elif int(os.environ.get("LOCAL_RANK", "0")) == 0:
        run.path.mkdir(parents=True, exist_ok=True, mode=0o700)
        run.write_control(run.by_torchrun, "")
        run.write_faults(faults)
        run.write_job(job)
        if rank == 0:
            record(run, command=sys.orig_argv, seed=job.seed)
            _advise(job)
    if rank == 0:
        run.write_status("running", pid=os.getpid(), process_started=process_started(), restarts=count)
    state = _wait_then_work(run, resume, job)
    if rank == 0:
        run.write_status(state, pid=os.getpid(), process_started=process_started(), restarts=count)
        run.write_summary(state)


def _num_nodes() -> int:
    """Return the number of machines, which torchrun calls groups."""
    return int(os.environ.get("GROUP_WORLD_SIZE", "1"))


def _read_job(file: Path, *, trust_code: bool) -> Job:
    """Return the job in a file, with the user functions stored next to it.

    Raises:
        ShardscopeError: The job cannot be read, or its functions are missing or not trusted.
    """
    from shardscope.runtime.record.load_job import load_job

    job = load_job(file, trust_code=trust_code)
    job.require_code()
    return job


def _for_this_world(job: Job) -> Job:
    """Return the job with the number of ranks that torchrun has started.

    An elastic job is returned unchanged, because its batch and learning rate on another number of ranks are derived
    from its original number. It is only checked that the job can train on this number of ranks.

    Raises:
        SpecError: The job cannot train on this number of ranks.
    """
    world_size = int(os.environ["WORLD_SIZE"])
    if job.elastic is not None:
        job.at_size(world_size)
        return job
    return job if job.world_size == world_size else job.replace(world_size=world_size)


def _is_under_way(run: RunDir) -> bool:
    """Return whether the run in this directory was started, and has neither completed nor been stopped."""
    status = run.read_status()
    return status is not None and status.state not in ("completed", "stopped")


def _advise(job: Job) -> None:
    if job.elastic is not None and os.environ.get(_UNSHARED) != "1":
        print(
            f"shardscope: set {_UNSHARED}=1 for torchrun, or its agents may end when a node joins",
            file=sys.stderr,
        )
    if job.elastic is not None and job.checkpoint.every is None:
        print(
            "shardscope: set checkpoint.every, or a resize starts from the first step again", file=sys.stderr
        )


def _wait_then_work(run: RunDir, resume: Resume | None, job: Job) -> str:
    deadline = time.monotonic() + 60
    while not (run.path / "job.json").is_file():
        if time.monotonic() > deadline:
            raise TimeoutError(
                f"no job.json appeared in {run.path} within 60 s; the first rank on this machine writes it: see its log"
            )
        time.sleep(0.02)
    return _work(run, resume, job)


class Resume(NamedTuple):
    """Source to resume from: a run directory, or a checkpoint in a run directory."""

    source: Path

    @property
    def checkpoints(self) -> Path:
        """The checkpoint, or the folder of checkpoints whose newest checkpoint is loaded."""
        return checkpoints_of(self.source)


def newest_of(run: RunDir, context: RankContext, otherwise: Resume | None) -> Resume | None:
    """Return the source to resume from: the run itself if it has a checkpoint, else `otherwise`. The result is equal on
    all ranks.
    """
    from shardscope.training.checkpoint import complete_checkpoints  # a slow import

    found = [bool(complete_checkpoints(run.path / "checkpoints"))] * context.world_size
    if context.group is not None:
        dist.all_gather_object(found, found[context.rank])
    return Resume(run.path) if any(found) else otherwise


def announce_resize(run: RunDir, job: Job, context: RankContext, saved: Loaded) -> None:
    """On rank 0, write an event if the state loaded from this run was saved by a different number of ranks."""
    from shardscope.training.checkpoint.memory import folder_here  # a slow import

    sources = {run.path / "checkpoints": "disk", folder_here(): "replica"}
    source = sources.get(saved.path.parent)
    if context.rank == 0 and source is not None and saved.world_size not in (None, context.world_size):
        context.events.emit(
            "resize", step=saved.step, before=saved.world_size, world_size=context.world_size, source=source,
            global_batch=job.batch.global_batch, lr=job.optimizer.lr,
        )  # fmt: skip


if __name__ == "__main__":
    _under_torchrun()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(
        0
    )  # as at the end of `_work`: threads in the backend may abort the process when the interpreter shuts down
