"""The run directory: where a run lives, from the moment it is asked for, and after everything else is gone.

    job.json        what was asked; `Job.from_json` reads it
    user_code.pkl   the user's own functions, if the job has any (see `code_file` for who may open it)
    status.json     state, the agent's process, the error; replaced whole, never half written
    rank-N.jsonl    events, appended by rank N
    control/        requests to the ranks: `stop`, and the answer `stop_at`; verdicts: `judged`, and the answer `heard`
    parameters.npz  all parameters after the last step, where `Record(parameters=True)` asks for them
    checkpoints/    written by `shardscope.training.checkpoint`
    logs/           what the ranks and the agent printed
    summary.json    figures of the finished run

The directory is private to the user (mode 0700).
"""

from __future__ import annotations

import json
import os
import re
import shutil
import socket
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Self

from shardscope.errors import LaunchError, RunNotFound, RunUnreadable, SpecError
from shardscope.runtime.code_file import CODE_FILE, digest_of, load_for_ranks, pack
from shardscope.runtime.files import parse_json, read_json, read_text, replace_whole
from shardscope.runtime.processes import ProcessStart, process_started
from shardscope.runtime.schema import Status, printable
from shardscope.spec import Job

ROOT_VARIABLE = "SHARDSCOPE_RUNS"
_RESERVE_BYTES = 64 * 1024
_LOG = re.compile(r"rank-(0|[1-9][0-9]{0,3})\.jsonl")


def runs_root(root: str | Path | None = None) -> Path:
    """The folder that holds all runs: `root`, else ``$SHARDSCOPE_RUNS``, else ``./runs``."""
    return Path(root or os.environ.get(ROOT_VARIABLE) or "runs").absolute()


def this_host() -> str:
    """Tells this machine, and this container on it, from every other: process numbers mean something only within."""
    try:
        namespace = os.readlink("/proc/self/ns/pid")
    except OSError:
        namespace = ""
    return f"{socket.gethostname()} {namespace}".strip()


@dataclass(frozen=True)
class RunDir:
    """Paths of one run, and its small files."""

    path: Path
    code: str | None = None
    """Digest of the user's code, where it may be loaded: on the ranks of the run it was launched with."""

    @classmethod
    def create(cls, job: Job, root: Path, *, judged: bool = False) -> Self:
        """Make the directory of a new run and write the job into it, and whether somebody judges it.

        Raises:
            LaunchError: The disk does not take it, or the user's code cannot be pickled.
        """
        stamp = time.strftime("%Y%m%d-%H%M%S")
        name = re.sub(r"[^A-Za-z0-9._-]+", "-", job.label).strip("-.") or "run"
        try:
            root.mkdir(parents=True, exist_ok=True)
            run = cls(_make_unique(root, f"{stamp}-{name}"))
            try:
                run.write_status("starting", pid=os.getpid(), process_started=process_started())
                run = replace(run, code=run.write_job(job))
                if judged:
                    run.judge(0)
            except BaseException:
                shutil.rmtree(run.path, ignore_errors=True)
                raise
        except OSError as error:
            raise LaunchError(
                f"cannot write the run directory in {root}: {error.strerror}; set {ROOT_VARIABLE}"
            ) from None
        return run

    def write_job(self, job: Job) -> str | None:
        """Write `job.json`, the user's code and the folders beside them; returns the digest of the code."""
        for folder in ("control", "checkpoints", "logs"):
            (self.path / folder).mkdir(mode=0o700, exist_ok=True)
        code = pack(job.user_code) if job.user_code else None
        if code is not None:
            self.write_whole(self.path / CODE_FILE, code)
        self.write_whole(self.path / "reserve", b"\0" * _RESERVE_BYTES)
        self.write_whole(self.path / "job.json", job.to_json().encode())
        return None if code is None else digest_of(code)

    def read_job(self, *, with_code: bool = False) -> Job:
        """The job of this run; `with_code` also loads the user's own functions, if it is known which they must be.

        Raises:
            LaunchError: The code is not what the launch wrote.
            RunUnreadable: `job.json` is missing or damaged.
        """
        job = read_job_file(self.path / "job.json", f"run {printable(self.path.name)}")
        if with_code and job.user_code and self.code is not None:
            return load_for_ranks(job, self.path / CODE_FILE, self.code)
        return job

    # Small files that are replaced whole.

    def write_whole(self, path: Path, content: bytes) -> None:
        """Replace a small file in one step: readers see the old content or the new, never a part."""
        replace_whole(path, content, within=self.path)

    def write_status(self, state: str, *, pid: int, process_started: ProcessStart, **fields: Any) -> None:
        """Replace `status.json`. On a full disk the run's reserve is given up for it."""
        status = Status(state, pid, process_started, t=time.time(), host=this_host(), **fields)
        self.write_json("status.json", asdict(status))

    def write_json(self, name: str, value: Any) -> None:
        """Replace a JSON file. On a full disk the run's reserve is given up for it."""
        content = json.dumps(value, indent=2).encode()
        try:
            self.write_whole(self.path / name, content)
        except OSError:
            self.release_reserve()
            self.write_whole(self.path / name, content)

    def release_reserve(self) -> None:
        """On a full disk, make room for the last words of the run."""
        (self.path / "reserve").unlink(missing_ok=True)

    def read_status(self) -> Status | None:
        """What `status.json` says; None if there is none.

        Raises:
            RunUnreadable: It does not say how the run stands.
        """
        try:
            return Status.of(read_json(self.path / "status.json"))
        except (FileNotFoundError, NotADirectoryError):
            return None

    def read_json(self, name: str) -> Any:
        """A JSON file of this run; None if it is not there.

        Raises:
            RunUnreadable: It is damaged, or not a file.
        """
        try:
            return read_json(self.path / name)
        except FileNotFoundError:
            return None

    # Requests to the ranks.

    @property
    def stop_request(self) -> Path:
        """There once somebody has asked the run to stop; holds the seconds of grace."""
        return self.path / "control" / "stop"

    @property
    def stop_at(self) -> Path:
        """Written by rank 0 in answer: the number of the last step."""
        return self.path / "control" / "stop_at"

    @property
    def judged(self) -> Path:
        """There from the start if somebody judges the run at its evaluations: the step of the last that may go on."""
        return self.path / "control" / "judged"

    @property
    def heard(self) -> Path:
        """Written by rank 0 once it knows, or has waited long enough: the step up to which no rank need wait."""
        return self.path / "control" / "heard"

    def request_stop(self, grace_s: float) -> None:
        """Ask the ranks to stop at the next step boundary."""
        self.write_control(self.stop_request, json.dumps(grace_s))

    def judge(self, step: int) -> None:
        """Tell the ranks that they may go on after the evaluation that followed this step; 0 before any."""
        self.write_control(self.judged, str(step))

    def write_control(self, path: Path, content: str) -> None:
        """Replace a file of ``control/``; the folder is made anew if it has been deleted, the run directory is not.

        Raises:
            FileNotFoundError: The run directory is gone.
        """
        path.parent.mkdir(mode=0o700, exist_ok=True)
        self.write_whole(path, content.encode())

    def is_gone_message(self) -> str:
        """What is wrong with a run whose directory has been deleted or moved, in a sentence."""
        return (
            f"the run directory {self.path} is gone: it was deleted or moved, and without it the run ended; "
            "launch the job again"
        )

    def rank_file(self, rank: int) -> Path:
        """The event log of a rank."""
        return self.path / f"rank-{rank}.jsonl"

    def rank_files(self) -> list[Path]:
        """The event logs that are there, by rank; none where the directory may not be looked into."""
        try:
            found = [
                (int(match[1]), name) for name in os.listdir(self.path) if (match := _LOG.fullmatch(name))
            ]
        except OSError:
            return []
        return [self.path / name for _, name in sorted(found)]


def find(id_or_path: str | Path, root: str | Path | None = None) -> RunDir:
    """The directory of a run, by its path or by its name below the runs' root.

    Raises:
        RunNotFound: There is none.
        RunUnreadable: There is one, and it is private to another user.
    """
    for path in (Path(id_or_path), runs_root(root) / id_or_path):
        if holds_run(path):
            return RunDir(path.absolute())
    raise RunNotFound(
        f"no run {printable(str(id_or_path))!r} here or in {runs_root(root)}; ss.runs() lists the runs there are"
    )


def holds_run(path: Path) -> bool:
    """Whether a folder holds a run, damaged or not: a job, a status or a log of events.

    Raises:
        RunUnreadable: The folder is private to another user.
    """
    try:
        names = os.listdir(path)
    except PermissionError:
        raise RunUnreadable(f"{printable(str(path))} is private to {_owner(path)}") from None
    except (OSError, ValueError):  # nothing there, a file, a name that no file can have
        return False
    return any(name in ("job.json", "status.json") or _LOG.fullmatch(name) for name in names)


def _owner(path: Path) -> str:
    try:
        return f"user {path.owner()}"
    except (OSError, KeyError):
        return "another user"


def read_job_file(file: Path, called: str) -> Job:
    """The job in a file; functions of the user's are known by their names only. Errors say what the file is `called`.

    Raises:
        RunUnreadable: The file is missing or damaged.
    """
    try:
        text = read_text(file)
        is_object = isinstance(parse_json(text), dict)
        if is_object:
            return Job.from_json(text)
        reason = "does not describe a job"
    except FileNotFoundError:
        reason = "is missing"
    except RunUnreadable as error:
        raise RunUnreadable(f"{called} cannot be read: {error}") from None
    except SpecError as error:
        reason = f"does not describe a job: {error}"
    except ValueError:
        reason = "is not JSON"
    raise RunUnreadable(f"{called} cannot be read: {file.name} {reason}")


def find_resumable(id_or_path: str | Path, root: str | Path | None = None) -> Path:
    """A run directory, as `find` finds it, or a checkpoint by its path.

    Raises:
        RunNotFound: There is neither.
    """
    path = Path(id_or_path)
    return path.absolute() if _is_checkpoint(path) else find(path, root).path


def checkpoints_of(path: Path) -> Path:
    """What to load of a path that `find_resumable` gave: the checkpoint, or the folder of the run's."""
    return path if _is_checkpoint(path) else path / "checkpoints"


def _is_checkpoint(path: Path) -> bool:
    return re.fullmatch(r"step-\d+", path.name) is not None and path.is_dir() and not holds_run(path)


def _make_unique(root: Path, name: str) -> Path:
    for number in range(1, 1000):
        path = root / (name if number == 1 else f"{name}-{number}")
        try:
            path.mkdir(mode=0o700)
        except FileExistsError:
            continue
        return path
    raise LaunchError(f"{root} already has 999 runs named {name!r}; give the job another name")
