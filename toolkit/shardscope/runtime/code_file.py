"""The file in which a job's own functions travel, and who may open it.

A job whose model, data or loss is a function of the user's is a `job.json` that names it and a `user_code.pkl` that
holds it (cloudpickle). Opening that file runs whatever is in it, and imports the modules that its functions come from.
So it is opened in two places only: by the ranks of a run, which are told by the launch itself which bytes to load, and
by `load_job`, if this process wrote these very bytes or the user says that they are to be trusted.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import cloudpickle

from shardscope.errors import LaunchError
from shardscope.runtime.files import read_bytes
from shardscope.runtime.schema import printable
from shardscope.spec import Job, UserCode

CODE_FILE = "user_code.pkl"
_MOST_BYTES = 16 * 2**30
"""Functions may carry arrays, which makes them large."""
_written_here: set[str] = set()
"""Digests of the code that this process has written."""


def pack(code: Mapping[str, UserCode]) -> bytes:
    """The functions of a job as the content of its code file.

    Raises:
        LaunchError: They cannot be pickled.
    """
    functions = {field: value.function for field, value in code.items()}
    try:
        content = bytes(cloudpickle.dumps(functions))
    except Exception as error:
        names = ", ".join(f"{field}={value.name}" for field, value in code.items())
        raise LaunchError(
            f"{names} cannot be sent to the ranks ({error}); open files and the like inside the function"
        ) from error
    _written_here.add(digest_of(content))
    return content


def read_code(path: Path) -> bytes:
    """The content of a code file, not opened.

    Raises:
        FileNotFoundError: There is none.
        RunUnreadable: It is not a file, or too large.
    """
    return read_bytes(path, most=_MOST_BYTES)


def digest_of(content: bytes) -> str:
    """The SHA-256 of a code file's content."""
    return hashlib.sha256(content).hexdigest()


def is_of_this_process(content: bytes) -> bool:
    """Whether this process has written this very code."""
    return digest_of(content) in _written_here


def with_code(job: Job, content: bytes, path: Path) -> Job:
    """The job with its functions, out of a code file that is trusted. This runs what is in it.

    Raises:
        LaunchError: The content is damaged, needs what is not installed here, or is not the code of this job.
    """
    try:
        functions = cloudpickle.loads(content)
    except Exception as error:  # whatever is in it may raise whatever it likes
        reason = printable(f"{type(error).__name__}: {error}")
        raise LaunchError(
            f"{path} cannot be loaded ({reason}); give the functions again with job.replace(...)"
        ) from error
    if not _are_functions(functions, job):
        raise LaunchError(
            f"{path} does not hold the code of this job; give the functions again with job.replace(...)"
        )
    return job.with_user_code(functions)


def _are_functions(value: Any, job: Job) -> bool:
    return isinstance(value, dict) and set(value) == set(job.user_code) and all(map(callable, value.values()))


def load_for_ranks(job: Job, path: Path, digest: str) -> Job:
    """The job with its functions, on a rank of the run that they were launched with.

    Raises:
        LaunchError: The file does not hold what the launch wrote there.
    """
    content = read_code(path)
    if digest_of(content) != digest:
        raise LaunchError(f"{path} has changed since the launch; nothing in it was run, launch again")
    return with_code(job, content, path)
