"""The run directory, which contains all files of a run. It is created at the launch and outlives all processes.

    job.json        the job, with the version of its schema; `Job.from_json` reads it
    user_code.pkl   the user's own functions, if the job has any (see `code_file` for who may load it)
    provenance.json versions, machine, git state and command line at the launch; see `provenance`
    prediction.json the step time predicted at the launch; see `launch_prediction`
    cluster.json    the emulated cluster that the run is on; missing if it is on this machine itself
    faults.json     the plan of faults, if the run has one
    about.json      group, note, baseline, the tool that launched the run, how labs show it; see `about`
    status.json     state, pid of the agent, error; replaced atomically
    rank-N.jsonl    events, appended by rank N
    control/        requests to the ranks (`stop`, `resize`, `approved`), rank 0's answers (`stop_at`, `decision`);
                    in `faults/`, which faults have been carried out (see `training.faults`)
    parameters.npz  all parameters after the last step, with `Record(parameters=True)`
    checkpoints/    written by `shardscope.training.checkpoint`
    logs/           stdout and stderr of the ranks and the agent
    summary.json    summary of the finished run

The directory is private to the user (mode 0700).
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import re
import shutil
import socket
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Self

from shardscope.errors import LaunchError, RunNotFound, RunUnreadable, SpecError, quoted
from shardscope.runlog.files import overwrite, parse_json, read_json, read_text, replace_whole
from shardscope.runlog.reducer import RunLog
from shardscope.runlog.summary import Summary, summarise, summary_from
from shardscope.runlog.tail import Tail, first_events, is_log
from shardscope.runtime.record.code_file import CODE_FILE, digest_of, load_for_ranks, pack
from shardscope.runtime.record.processes import ProcessStart, process_started
from shardscope.runtime.record.status import Status, in_one_block, printable
from shardscope.spec import Job
from shardscope.spec.cluster import EmulatedCluster
from shardscope.spec.faults import Faults
from shardscope.training.disk import takes_no_more

ROOT_VARIABLE = "SHARDSCOPE_RUNS"
CLUSTER_FILE, FAULTS_FILE = "cluster.json", "faults.json"
_CHECKPOINT = re.compile(r"step-(\d{1,18})")
_RESERVE_BYTES = 64 * 1024
_UNWRITABLE = {errno.EROFS, errno.EACCES, errno.EPERM, errno.ENOSPC, errno.EDQUOT}
"""Errors of a folder that cannot be written."""
_LONGEST_NAME = 100
"""Maximum number of characters of a run's name in its directory's name, which file systems limit to 255 bytes."""


def unwritable(where: str | Path, error: OSError) -> LaunchError:
    """Return the error of a launch whose run directory cannot be written."""
    return LaunchError(
        f"cannot write the run directory {where}: {error.strerror}; set {ROOT_VARIABLE} to another folder"
    )


def runs_root(root: str | Path | None = None) -> Path:
    """Return the folder of all runs: `root`, else ``$SHARDSCOPE_RUNS``, else ``./runs``.

    Raises:
        SpecError: No folder can have this name.
    """
    name = str(root or os.environ.get(ROOT_VARIABLE) or "runs")
    if "\0" in name:
        raise SpecError(f"root={quoted(name)} has a null byte, which no folder's name has; leave it out")
    return Path(name).absolute()


def this_host() -> str:
    """Return an identifier of this machine and pid namespace (container), within which pids are unique."""
    try:
        namespace = os.readlink("/proc/self/ns/pid")
    except OSError:
        namespace = ""
    return f"{socket.gethostname()} {namespace}".strip()


@dataclass(frozen=True)
class RunDir:
    """The directory of one run: paths of its files, with methods to read and write small files."""

    path: Path
    code: str | None = None
    """SHA-256 digest of the user's code; set only by `create` and on the run's ranks, which may load the code."""

    @classmethod
    def create(
        cls,
        job: Job,
        root: Path,
        *,
        gated: bool = False,
        about: Mapping[str, str] | None = None,
        cluster: EmulatedCluster | None = None,
        faults: Faults | None = None,
    ) -> Self:
        """Create the directory of a new run and write its job; if `gated`, also create the file that `approval` names.

        Args:
            job: The job of the run.
            root: Folder of the runs.
            gated: Whether the run waits for approval after each evaluation.
            about: Content of `about.json`; the file is not written if this is empty.
            cluster: The emulated cluster that the run is on; None for this machine itself.
            faults: The plan of faults; None or an empty plan if there are none.

        Raises:
            LaunchError: The directory cannot be written, or the user's code cannot be pickled.
        """
        stamp = time.strftime("%Y%m%d-%H%M%S")
        name = re.sub(r"[^A-Za-z0-9._-]+", "-", job.label)[:_LONGEST_NAME].strip("-.") or "run"
        try:
            root.mkdir(parents=True, exist_ok=True)
            run = cls(_make_unique(root, f"{stamp}-{name}"))
            try:
                run.write_status("starting", pid=os.getpid(), process_started=process_started())
                if about:
                    run.write_json("about.json", about)
                if cluster is not None:
                    run.write_whole(run.path / CLUSTER_FILE, cluster.to_json().encode())
                run.write_faults(faults)
                run = replace(run, code=run.write_job(job))
                if gated:
                    run.approve(0)
            except BaseException:
                shutil.rmtree(run.path, ignore_errors=True)
                raise
        except OSError as error:
            raise unwritable(f"in {root}", error) from None
        return run

    def write_job(self, job: Job) -> str | None:
        """Write `job.json` and the user's code, and create the subfolders. Return the digest of the code."""
        for folder in ("control", "checkpoints", "logs"):
            (self.path / folder).mkdir(mode=0o700, exist_ok=True)
        code = pack(job.user_code) if job.user_code else None
        if code is not None:
            self.write_whole(self.path / CODE_FILE, code)
        self.write_whole(self.path / "reserve", b"\0" * _RESERVE_BYTES)
        self.write_whole(self.path / "job.json", job.to_json().encode())
        return None if code is None else digest_of(code)

    def read_cluster(self) -> EmulatedCluster | None:
        """Return the emulated cluster that the run is on; None for this machine itself.

        Raises:
            RunUnreadable: The file is corrupt.
        """
        fields = self.read_json(CLUSTER_FILE)
        try:
            return None if fields is None else EmulatedCluster.from_fields(fields)
        except SpecError as error:
            raise RunUnreadable(
                f"{CLUSTER_FILE} of run {printable(self.path.name)} is damaged: {error}"
            ) from None

    def write_faults(self, faults: Faults | None) -> None:
        """Write the plan of faults, unless it is empty."""
        if faults:
            self.write_whole(self.path / FAULTS_FILE, faults.to_json().encode())

    def read_faults(self) -> Faults:
        """Return the plan of faults of this run; empty if it has none.

        Raises:
            RunUnreadable: The file is corrupt.
        """
        fields = self.read_json(FAULTS_FILE)
        try:
            return Faults() if fields is None else Faults.from_fields(fields)
        except SpecError as error:
            raise RunUnreadable(
                f"{FAULTS_FILE} of run {printable(self.path.name)} is damaged: {error}"
            ) from None

    @property
    def fault_claims(self) -> Path:
        """Folder that records which faults have occurred."""
        return self.path / "control" / "faults"

    def read_job(self, *, with_code: bool = False) -> Job:
        """Return the job of this run. `with_code` also loads the user's own functions, if their digest is known.

        Raises:
            LaunchError: The code has changed since the launch, or cannot be loaded.
            RunUnreadable: `job.json` is missing or corrupt, or the events are from a newer version.
        """
        called = f"run {printable(self.path.name)}"
        try:
            first_events(self.path)
        except RunUnreadable as error:
            raise RunUnreadable(f"{called} cannot be read: {error}") from None
        job = read_job_file(self.path / "job.json", called)
        if with_code and job.user_code and self.code is not None:
            return load_for_ranks(job, self.path / CODE_FILE, self.code)
        return job

    def log_files(self, rank: int | None) -> list[Path]:
        """Return the files with the stdout and stderr of a rank, or of the agent if `rank` is None."""
        folder = self.path / "logs"
        if rank is None:
            return [folder / "agent.log"]
        cluster = self.read_cluster()
        node, local_rank = (None, rank) if cluster is None else divmod(rank, cluster.per_node)
        of_node = "" if node is None else f"node-{node}/"
        found = folder.glob(f"{of_node}*/attempt_*/{local_rank}/std*.log")
        return sorted(
            found, key=lambda path: (path.parent.stat().st_mtime, path)
        )  # restarts have folders of their own

    # Small files that are replaced atomically.

    def write_whole(self, path: Path, content: bytes) -> None:
        """Replace a small file atomically: readers see the old content or the new, never a mixture."""
        replace_whole(path, content, within=self.path)

    def write_status(self, state: str, *, pid: int, process_started: ProcessStart, **fields: Any) -> None:
        """Replace `status.json`; if the disk is full even after space was freed, overwrite the file in place."""
        status = Status(state, pid, process_started, t=time.time(), host=this_host(), **fields)
        try:
            self.write_json("status.json", asdict(status))
        except OSError as error:
            if not takes_no_more(error):
                raise
            overwrite(self.path / "status.json", in_one_block(status))

    def is_read_only(self) -> bool:
        """Return whether nothing can be written to the directory although it exists, as on a failing disk."""
        is_effective = os.access in os.supports_effective_ids
        return self.path.is_dir() and not os.access(self.path, os.W_OK | os.X_OK, effective_ids=is_effective)

    def refuses(self, error: OSError) -> bool:
        """Return whether an error means that this directory cannot be written, so that another folder may help."""
        named = error.filename
        is_here = named is None or (isinstance(named, str | Path) and _is_within(Path(named), self.path))
        return is_here and error.errno in _UNWRITABLE

    def write_json(self, name: str, value: Any) -> None:
        """Replace a JSON file. If the disk is full, the run's reserve file is deleted to make room."""
        content = json.dumps(value, indent=2).encode()
        try:
            self.write_whole(self.path / name, content)
        except OSError:
            self.release_reserve()
            self.write_whole(self.path / name, content)

    def write_summary(self, state: str) -> None:
        """Write `summary.json` for a run that has ended in `state`."""
        job = self.read_job()
        log = RunLog.of(job)
        for batch in Tail(self.path).batches():
            log.feed(batch)
        self.write_json("summary.json", asdict(summarise(log, state, job)))

    def read_summary(self) -> Summary | None:
        """Return the summary that was written when the run ended; None if there is none that can be read."""
        try:
            stored = read_json(self.path / "summary.json")
        except (OSError, RunUnreadable):
            return None
        return summary_from(stored)

    def release_reserve(self) -> None:
        """Delete the reserve file, so that the final status and events fit on a full disk."""
        (self.path / "reserve").unlink(missing_ok=True)

    def read_status(self) -> Status | None:
        """Return the content of `status.json`; None if the file does not exist.

        Raises:
            RunUnreadable: The file does not contain a valid status.
        """
        try:
            return Status.of(read_json(self.path / "status.json"))
        except (FileNotFoundError, NotADirectoryError):
            return None

    def read_json(self, name: str) -> Any:
        """Return the content of a JSON file of this run; None if the file does not exist.

        Raises:
            RunUnreadable: The file is corrupt, or is not a regular file.
        """
        try:
            return read_json(self.path / name)
        except FileNotFoundError:
            return None

    # Requests to the ranks.

    @property
    def stop_request(self) -> Path:
        """File that requests the run to stop; contains the grace period in seconds."""
        return self.path / "control" / "stop"

    @property
    def stop_at(self) -> Path:
        """File with rank 0's answer to a stop request: the number of the last step."""
        return self.path / "control" / "stop_at"

    @property
    def resize_request(self) -> Path:
        """File that requests another number of ranks; contains this number."""
        return self.path / "control" / "resize"

    @property
    def by_torchrun(self) -> Path:
        """File that exists if torchrun starts the ranks, so that the run has no agent of its own."""
        return self.path / "control" / "torchrun"

    @property
    def approval(self) -> Path:
        """File with the step of the latest approved evaluation, or 0; it exists from the start of a gated run."""
        return self.path / "control" / "approved"

    @property
    def decision(self) -> Path:
        """File with the last evaluation after which ranks may continue; rank 0 writes it once it is approved."""
        return self.path / "control" / "decision"

    def request_stop(self, grace_s: float) -> None:
        """Request the ranks to stop at the end of a step; they are killed after `grace_s` seconds."""
        self.write_control(self.stop_request, json.dumps(grace_s))

    def request_resize(self, world_size: int) -> None:
        """Request the ranks to save their state and end after a step, so that `world_size` new ranks continue."""
        self.write_control(self.resize_request, str(world_size))

    def approve(self, step: int) -> None:
        """Let the ranks continue past the evaluation at `step`; 0 marks a new run as gated."""
        self.write_control(self.approval, str(step))

    def write_control(self, path: Path, content: str) -> None:
        """Replace a file in ``control/``. The folder is recreated if it was deleted; the run directory is not.

        Raises:
            FileNotFoundError: The run directory is missing.
        """
        path.parent.mkdir(mode=0o700, exist_ok=True)
        self.write_whole(path, content.encode())

    def is_gone_message(self) -> str:
        """Return the error message for a run whose directory has been deleted or moved."""
        return (
            f"the run directory {self.path} is gone: it was deleted or moved, which ended the run; launch the job "
            "again"
        )

    def saved_steps(self) -> list[int]:
        """Return the steps of the complete checkpoints in this directory."""
        try:
            names = os.listdir(self.path / "checkpoints")
        except OSError:
            return []
        return [int(found[1]) for name in names if (found := _CHECKPOINT.fullmatch(name))]

    def unfinished_bytes(self) -> int:
        """Return the size of unfinished checkpoints in bytes: those being written, or whose writing was interrupted."""
        total = 0
        for file in self.path.glob("checkpoints/step-*.partial/*"):
            with contextlib.suppress(FileNotFoundError):  # the checkpoint has just been completed
                total += file.stat().st_size
        return total

    def rank_file(self, rank: int) -> Path:
        """Return the path of a rank's event log."""
        return self.path / f"rank-{rank}.jsonl"


def _is_within(path: Path, folder: Path) -> bool:
    """Return whether a path is in a folder. Relative paths count as inside, since they are relative to the folder."""
    return not path.is_absolute() or path.is_relative_to(folder)


def faults_from(text: str | None) -> Faults:
    """Return the plan of faults that an option gives: in words, or as the path of a ``faults.json``.

    Raises:
        SpecError: The file cannot be read, or a fault is not valid.
    """
    if text is None or not text.endswith(".json"):
        return Faults.of(text)
    try:
        return Faults.from_json(Path(text).read_text())
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "it is not text"
        raise SpecError(
            f"faults={text!r} cannot be read ({reason}); give a faults.json, or for example 'kill rank=1 step=40'"
        ) from None


def find(id_or_path: str | Path, root: str | Path | None = None) -> RunDir:
    """Return the directory of a run, given its path, or its name in the folder of runs (see `runs_root`).

    Raises:
        RunNotFound: No such run exists.
        RunUnreadable: The run exists but is private to another user.
    """
    for path in (Path(id_or_path), runs_root(root) / id_or_path):
        if holds_run(path):
            return RunDir(path.absolute())
    raise RunNotFound(
        f"no run {printable(str(id_or_path))!r} in the current folder or in {runs_root(root)}; ss.runs() lists all runs"
    )


def holds_run(path: Path) -> bool:
    """Return whether a folder contains a run, corrupt or not: a job, a status or an event log.

    Raises:
        RunUnreadable: The folder is private to another user.
    """
    try:
        names = os.listdir(path)
    except PermissionError:
        raise RunUnreadable(f"{printable(str(path))} is private to {_owner(path)}") from None
    except (OSError, ValueError):  # missing, not a folder, or an invalid file name
        return False
    return any(name in ("job.json", "status.json") or is_log(name) for name in names)


def _owner(path: Path) -> str:
    try:
        return f"user {path.owner()}"
    except (OSError, KeyError):
        return "another user"


def read_job_file(file: Path, called: str) -> Job:
    """Return the job in a file; user functions appear by name only. Error messages refer to the file as `called`.

    Fields that a newer version has added are left out (`Job.left_out`).

    Raises:
        RunUnreadable: The file is missing, corrupt, or has a newer schema.
    """
    try:
        text = read_text(file)
        is_object = isinstance(parse_json(text), dict)
        if is_object:
            return Job.from_history(text)
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
    """Return the path of a checkpoint or, for anything else, of the run directory that `find` returns.

    Raises:
        RunNotFound: There is neither a checkpoint nor a run.
    """
    path = Path(id_or_path)
    return path.absolute() if _is_checkpoint(path) else find(path, root).path


def checkpoints_of(path: Path) -> Path:
    """Return the path to resume from, given a path from `find_resumable`: the checkpoint, or the run's checkpoints."""
    return path if _is_checkpoint(path) else path / "checkpoints"


def cluster_of(path: Path) -> EmulatedCluster | None:
    """Return the emulated cluster of a run, given a path from `find_resumable`; None for the machine itself.

    A checkpoint outside a run directory has no cluster.

    Raises:
        RunUnreadable: The run's file that describes the cluster is corrupt.
    """
    return RunDir(path.parent.parent if _is_checkpoint(path) else path).read_cluster()


def _is_checkpoint(path: Path) -> bool:
    return _CHECKPOINT.fullmatch(path.name) is not None and path.is_dir() and not holds_run(path)


def _make_unique(root: Path, name: str) -> Path:
    for number in range(1, 1000):
        path = root / (name if number == 1 else f"{name}-{number}")
        try:
            path.mkdir(mode=0o700)
        except FileExistsError:
            continue
        return path
    raise LaunchError(f"{root} already has 999 runs named {name!r}; give the job another name")
