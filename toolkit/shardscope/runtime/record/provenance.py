"""Origin of a run: versions, machine, git state and command line, recorded in ``provenance.json`` at its launch.

The agent records it in a thread while the ranks start, so a launch does not wait for it. The launch server looks up
once what is the same for all launches (versions and machine); the agents, which are forked from it, reuse these values.
Git runs in a separate process with a time limit: a repository may be huge, or on a disk that does not respond.
"""

from __future__ import annotations

import json
import os
import platform
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Self

from shardscope._version import __version__
from shardscope.errors import RunUnreadable
from shardscope.machine import cpu_model, usable_cores, usable_memory_bytes
from shardscope.runtime.record.rundir import RunDir
from shardscope.runtime.record.status import printable

FILE = "provenance.json"
_PACKAGES = ("torch", "numpy", "optuna", "pydantic", "cloudpickle", "pandas", "scikit-learn", "numba")
_GIT_WITHIN_S = 5.0
_GPUS = Path("/proc/driver/nvidia/gpus")


@dataclass(frozen=True)
class Provenance:
    """The environment of a run at its launch.

    Attributes:
        time: Time of the launch, in Unix seconds.
        command: Command line of the process that launched it.
        directory: Working directory of that process.
        seed: The job's seed.
        versions: Versions by name: shardscope, python and installed packages.
        machine: ``host``, ``platform``, ``cpu`` (model), ``cores`` and ``memory_bytes`` (limits of the process) and
            ``gpus`` (models).
        commit: Git commit of the working directory; None if there is no repository, or git did not respond.
        is_dirty: Whether tracked files differed from that commit; None if unknown.
    """

    time: float
    command: tuple[str, ...]
    directory: str
    seed: int | None
    versions: Mapping[str, str] = field(default_factory=dict)
    machine: Mapping[str, Any] = field(default_factory=dict)
    commit: str | None = None
    is_dirty: bool | None = None

    @classmethod
    def here(cls, *, command: Sequence[str], seed: int | None = None) -> Self:
        """Return the environment of this process and its working directory."""
        commit, is_dirty = _git_state(Path.cwd())
        return cls(
            time.time(), tuple(command), str(Path.cwd()), seed, _versions(), _machine(), commit, is_dirty
        )

    @classmethod
    def of(cls, value: Any) -> Self | None:
        """Return the provenance in a parsed JSON value; None if it is invalid. Unknown fields are ignored."""
        if not isinstance(value, dict) or not isinstance(value.get("time"), int | float):
            return None
        versions, about = (
            {printable(str(key)): held for key, held in value.get(name, {}).items()}
            if isinstance(value.get(name), dict)
            else {}
            for name in ("versions", "machine")
        )
        command, seed, is_dirty = (value.get(name) for name in ("command", "seed", "is_dirty"))
        return cls(
            float(value["time"]), tuple(map(_text, command)) if isinstance(command, list) else (),
            _text(value.get("directory") or ""), seed if type(seed) is int else None,
            {name: _text(held) for name, held in versions.items()}, about,
            _text(value["commit"]) if isinstance(value.get("commit"), str) else None,
            is_dirty if isinstance(is_dirty, bool) else None,
        )  # fmt: skip

    def __str__(self) -> str:
        told = [
            f"{name} {self.versions[name]}"
            for name in ("shardscope", "torch", "python")
            if name in self.versions
        ]
        if self.commit is not None:
            told.append(f"commit {self.commit[:10]}{' with uncommitted changes' * bool(self.is_dirty)}")
        return ", ".join(told)

    def differences(self, other: Self) -> Iterator[str]:
        """Yield a sentence for each difference to another environment that may change the results of a run."""
        for name in {**self.versions, **other.versions}:
            if self.versions.get(name) != other.versions.get(name):
                yield _sentence(name, self.versions.get(name), other.versions.get(name))
        for name in ("platform", "cpu", "cores", "gpus"):
            if self.machine.get(name) != other.machine.get(name):
                yield _sentence(name, self.machine.get(name), other.machine.get(name))
        if self.commit != other.commit:
            yield _sentence("git commit of the working directory", self.commit, other.commit)
        for provenance, when in ((self, "was"), (other, "is")):
            if provenance.is_dirty:
                yield f"the working directory {when} modified since commit {(provenance.commit or '')[:10]}"


def record(run: RunDir, *, command: Sequence[str], seed: int | None) -> None:
    """Write the environment of this process into a run directory.

    Args:
        run: The run directory.
        command: Command line of the process that launched the run.
        seed: The job's seed.

    Raises:
        OSError: The file cannot be written, for example on a full disk. The reserve file is kept for the final status.
    """
    content = json.dumps(asdict(Provenance.here(command=command, seed=seed)), indent=2)
    run.write_whole(run.path / FILE, content.encode())


def read(run: RunDir) -> Provenance | None:
    """Return the provenance of a run; None if its file is corrupt, or missing, as in runs from earlier versions."""
    try:
        return Provenance.of(run.read_json(FILE))
    except (OSError, RunUnreadable):
        return None


def look_up() -> None:
    """Look up and cache the versions and the machine, so that processes forked from this one need not do so."""
    _versions()
    _machine()


@cache
def _versions() -> dict[str, str]:
    found = {"shardscope": __version__, "python": platform.python_version()}
    for package in _PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found


@cache
def _machine() -> dict[str, Any]:
    return {
        "host": platform.node(), "platform": f"{platform.system()} {platform.machine()}", "cpu": cpu_model(),
        "cores": usable_cores(), "memory_bytes": usable_memory_bytes(), "gpus": _gpus(),
    }  # fmt: skip


def _gpus() -> list[str]:
    """Return the models of this machine's NVIDIA GPUs, from driver files: opening a CUDA context would take seconds."""
    try:
        files = sorted(_GPUS.glob("*/information"))
        lines = [line for file in files for line in file.read_text().splitlines()]
    except OSError:
        return []
    return [line.partition(":")[2].strip() for line in lines if line.startswith("Model:")]


def _git_state(folder: Path) -> tuple[str | None, bool | None]:
    """Return a repository's commit, and whether tracked files differ from it; None for each that is unknown."""
    if not any((parent / ".git").exists() for parent in (folder, *folder.parents)):
        return None, None  # without starting git, which takes milliseconds
    commit = _git(folder, "rev-parse", "--verify", "--quiet", "HEAD")
    changed = None if commit is None else _git(folder, "status", "--porcelain", "--untracked-files=no")
    return (commit or "").strip() or None, None if changed is None else bool(changed)


def _git(folder: Path, *arguments: str) -> str | None:
    """Return the output of a read-only git command; None if it fails. It runs no hooks and takes no locks."""
    command = ["git", "-c", "core.fsmonitor=false", *arguments]
    quiet = {**os.environ, "GIT_OPTIONAL_LOCKS": "0", "GIT_TERMINAL_PROMPT": "0"}
    try:
        done = subprocess.run(
            command, cwd=folder, env=quiet, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL, timeout=_GIT_WITHIN_S, check=False,
        )  # fmt: skip
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.decode(errors="replace") if done.returncode == 0 else None


def _text(value: Any) -> str:
    return printable(str(value))


def _sentence(name: str, then: object, now: object) -> str:
    before, after = ("none" if value in (None, []) else _text(value) for value in (then, now))
    return f"{name} was {before} and is {after}"
