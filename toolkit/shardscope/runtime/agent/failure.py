"""Find the rank that failed first, and its error: when a rank dies, its peers fail too, but only as a consequence."""

from __future__ import annotations

import signal
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

from shardscope.runlog.tail import Event, of_last_attempt, read_events, select
from shardscope.runtime.record.processes import signal_name
from shardscope.runtime.record.rundir import RunDir
from shardscope.runtime.record.secondary_failure import TIMED_OUT, is_secondary_failure
from shardscope.runtime.record.status import Cause
from shardscope.spec import Job

BY_AGENT = -signal.SIGTERM
"""Exit code of ranks that elastic ends with this signal because another rank has ended."""


@dataclass(frozen=True)
class Ending:
    """How a run ended; the fields are those of `status.json`."""

    state: str
    reason: str | None = None
    error: dict[str, Any] | None = None
    cause: Cause | None = None


def describe_failure(run: RunDir, job: Job, failed: ChildFailedError, exit_codes: dict[int, int]) -> Ending:
    """Return the ending of a run whose ranks failed, with the error in the form that `RunFailed` takes.

    Args:
        run: Directory of the run, whose events are read.
        job: The job of the run.
        failed: The error from elastic, with the ranks that had failed when elastic first checked.
        exit_codes: Known exit codes of the rank processes, by pid.
    """
    events = of_last_attempt(read_events(run.path))
    errors = sorted(select(events, "error", None), key=lambda event: event["t"])
    causes = [event for event in errors if not is_secondary_failure(event)]
    ranks = {event["pid"]: event["rank"] for event in select(events, "process", None)}
    known = {ranks[pid]: code for pid, code in exit_codes.items() if pid in ranks}
    codes = {rank: failure.exitcode for rank, failure in failed.failures.items()} | known
    said_why = {event["rank"] for event in errors}
    finished = {event["rank"] for event in select(events, "end", None)}
    silent = {
        rank: code
        for rank, code in codes.items()
        if rank not in said_why and code != BY_AGENT and not (code == 0 and rank in finished)
    }
    if causes:
        return _from_event(causes[0], job)
    if silent:
        # a rank that was killed, then one that ended with an error, then one that pretends that all is well
        rank = min(silent, key=lambda rank: (silent[rank] >= 0, silent[rank] == 0, rank))
        return _from_exit(run, job, rank, silent[rank])
    stuck = _stuck(errors, {*ranks.values()} - finished)
    if stuck is not None:
        return _from_silence(run, job, stuck)
    if errors:
        return _from_event(errors[0], job)
    rank, first = failed.get_first_failure()
    return _from_exit(run, job, rank, first.exitcode)


def describe_silent_end(run: RunDir, job: Job, pids: Iterable[int]) -> Ending:
    """Return the ending of a run whose ranks have all ended with exit code 0, some of them in mid-training.

    Args:
        run: Directory of the run, whose events are read.
        job: The job of the run.
        pids: Pids of the rank processes.
    """
    unnamed = ChildFailedError("ranks", {0: ProcessFailure(0, 0, 0, "")})
    return describe_failure(run, job, unnamed, dict.fromkeys(pids, 0))


def _stuck(errors: Sequence[Event], ranks: set[int]) -> int | None:
    """Return the only one of `ranks` without an error, if all errors are waits for others that have timed out."""
    waited = errors and all(TIMED_OUT in event["message"] for event in errors)
    left = ranks - {event["rank"] for event in errors}
    return left.pop() if waited and len(left) == 1 else None


def _who(rank: int, job: Job) -> str:
    role = job.strategy.role(rank, job.world_size)
    return f"rank {rank}{f' ({role})' if role else ''} of strategy {job.strategy.label!r}"


def _from_event(event: dict[str, Any], job: Job) -> Ending:
    where = f"at step {event['step']}" if event["step"] else "before its first step"
    message = f"{_who(event['rank'], job)} failed {where}: {event['type']}: {event['message']}"
    keep = {key: event[key] for key in ("rank", "step", "traceback")}
    error = {"message": message, "strategy": job.strategy.label, "type": event["type"], **keep}
    return Ending("failed", error=error)


def _from_exit(run: RunDir, job: Job, rank: int, exitcode: int) -> Ending:
    step = _last_step(run, rank)
    see = "" if exitcode == -signal.SIGKILL else f"; see run.logs({rank})"
    kills = [event for event in _events(run, "fault", rank) if event["kind"] == "kill"]
    message = f"{_who(rank, job)} {_how(exitcode, step, 'its', is_planned=bool(kills))}{see}"
    error = {"message": message, "rank": rank, "step": step, "strategy": job.strategy.label}
    return Ending("failed", error=error, cause=_cause(exitcode))


def _from_silence(run: RunDir, job: Job, rank: int) -> Ending:
    step = _last_step(run, rank)
    message = (
        f"{_who(rank, job)} stopped responding {_after(step)}, and the others waited {job.timeout_s:g} s for it "
        f"(timeout_s): it was paused, or its code does not return; see run.logs({rank})"
    )
    return Ending(
        "failed", error={"message": message, "rank": rank, "step": step, "strategy": job.strategy.label}
    )


def describe_lost_forkserver(run: RunDir, job: Job, pid: int, exitcode: int) -> Ending:
    """Return the ending of a run whose ranks ended because their forkserver ended.

    Args:
        run: Directory of the run.
        job: The job of the run.
        pid: Process id of the forkserver.
        exitcode: Exit code of the forkserver; the negative signal number if a signal killed it.
    """
    step = _last_step(run)
    message = (
        f"the forkserver of run {run.path.name} (process {pid}) {_how(exitcode, step, 'the')}; "
        "its ranks ended with it"
    )
    error = {"message": message, "rank": None, "step": step, "strategy": job.strategy.label}
    return Ending("failed", error=error, cause=_cause(exitcode))


def _how(exitcode: int, step: int, whose: str, *, is_planned: bool = False) -> str:
    where = _after(step, whose)
    if exitcode == -signal.SIGKILL and is_planned:
        return f"was killed by SIGKILL {where}, as the fault plan requested"
    if exitcode == -signal.SIGKILL:
        return f"was killed by SIGKILL {where} (by hand, or by the system because memory ran out)"
    if exitcode < 0:
        return f"was killed by {signal_name(-exitcode)} {where}"
    told = (
        ""
        if exitcode
        else ", without an error: its code, or a library, ends the process, as os._exit(0) does"
    )
    return f"ended with exit code {exitcode} {where}{told}"


def _after(step: int, whose: str = "its") -> str:
    return f"after step {step}" if step else f"before {whose} first step"


def _cause(exitcode: int) -> Cause | None:
    return Cause.KILLED if exitcode < 0 else None


def _last_step(run: RunDir, rank: int | None = None) -> int:
    return max((event["step"] for event in _events(run, "step", rank)), default=0)


def _events(run: RunDir, kind: str, rank: int | None) -> list[Event]:
    """Return the events of one kind since the last start of the ranks."""
    return select(of_last_attempt(read_events(run.path)), kind, rank)
