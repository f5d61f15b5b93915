"""The run directory: where a run lives, from the moment it is asked for, and after everything else is gone.

    job.json        what was asked; `Job.from_json` reads it
    user_code.pkl   the user's own functions, if the job has any (cloudpickle; opened only if this user wrote it)
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
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Self

import cloudpickle

from shardscope.errors import LaunchError, RunNotFound
from shardscope.spec import Job, UserCode

ROOT_VARIABLE = "SHARDSCOPE_RUNS"
FINAL_STATES = frozenset({"completed", "stopped", "failed"})
_RESERVE_BYTES = 64 * 1024


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
class Status:
    """What `status.json` says. `pid` and `process_started` identify the process that looks after the run."""

    state: str
    pid: int
    process_started: float
    t: float
    host: str = ""
    detached: bool = False
    reason: str | None = None
    error: Mapping[str, Any] | None = None


@dataclass(frozen=True)
class RunDir:
    """Paths of one run, and its small files."""

    path: Path

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
                run.write_job(job)
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

    def write_job(self, job: Job) -> None:
        """Write `job.json`, the user's code and the folders beside them."""
        for folder in ("control", "checkpoints", "logs"):
            (self.path / folder).mkdir(mode=0o700, exist_ok=True)
        if job.user_code:
            self.write_whole(self.path / "user_code.pkl", _pickle(job.user_code))
        self.write_whole(self.path / "reserve", b"\0" * _RESERVE_BYTES)
        self.write_whole(self.path / "job.json", job.to_json().encode())

    def read_job(self, *, with_code: bool = False) -> Job:
        """The job of this run; `with_code` also loads the user's own functions.

        Raises:
            LaunchError: The code was written by someone else.
        """
        job = Job.from_json((self.path / "job.json").read_text())
        if not (with_code and job.user_code):
            return job
        code = self.path / "user_code.pkl"
        if code.stat().st_uid != os.getuid():
            raise LaunchError(f"{code} was written by another user; only your own code is run")
        return job.replace(**cloudpickle.loads(code.read_bytes()))

    # Small files that are replaced whole.

    def write_whole(self, path: Path, content: bytes) -> None:
        """Replace a small file in one step: readers see the old content or the new, never a part."""
        partial = path.with_name(f".{path.name}.{os.getpid()}")
        with open(os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:
            file.write(content)
        partial.replace(path)

    def write_status(self, state: str, *, pid: int, process_started: float, **fields: Any) -> None:
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
        """What `status.json` says; None if there is none."""
        value = self.read_json("status.json")
        return None if value is None else Status(**value)

    def read_json(self, name: str) -> Any:
        """A JSON file of this run; None if it is not there."""
        try:
            return json.loads((self.path / name).read_text())
        except (FileNotFoundError, json.JSONDecodeError):
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
        self.write_whole(self.stop_request, json.dumps(grace_s).encode())

    def judge(self, step: int) -> None:
        """Tell the ranks that they may go on after the evaluation that followed this step; 0 before any."""
        self.write_whole(self.judged, str(step).encode())

    def rank_file(self, rank: int) -> Path:
        """The event log of a rank."""
        return self.path / f"rank-{rank}.jsonl"

    def rank_files(self) -> list[Path]:
        """The event logs that are there, by rank."""
        return sorted(self.path.glob("rank-*.jsonl"), key=lambda path: int(path.stem.removeprefix("rank-")))


def find(id_or_path: str | Path, root: str | Path | None = None) -> RunDir:
    """The directory of a run, by its path or by its name below the runs' root.

    Raises:
        RunNotFound: There is none.
    """
    for path in (Path(id_or_path), runs_root(root) / id_or_path):
        if (path / "job.json").is_file():
            return RunDir(path.absolute())
    raise RunNotFound(
        f"no run {str(id_or_path)!r} here or in {runs_root(root)}; ss.runs() lists the runs there are"
    )


def _make_unique(root: Path, name: str) -> Path:
    for number in range(1, 1000):
        path = root / (name if number == 1 else f"{name}-{number}")
        try:
            path.mkdir(mode=0o700)
        except FileExistsError:
            continue
        return path
    raise LaunchError(f"{root} already has 999 runs named {name!r}; give the job another name")


def _pickle(code: Mapping[str, UserCode]) -> bytes:
    functions = {field: value.function for field, value in code.items()}
    try:
        return bytes(cloudpickle.dumps(functions))
    except Exception as error:
        names = ", ".join(f"{field}={value.name}" for field, value in code.items())
        raise LaunchError(
            f"{names} cannot be sent to the ranks ({error}); open files and the like inside the function"
        ) from error
