"""The code file of a job, which contains the user's own functions, and the rules for loading it.

A job whose model, data or loss is a user function consists of a `job.json` that names the function and a
`user_code.pkl` that contains it (cloudpickle). Unpickling that file runs any code in it, and imports the modules from
which its functions come. So only two callers unpickle it: the ranks of a run, which receive the digest of the file from
the launch, and `load_job`, if this process wrote exactly this content or the caller passes ``trust_code=True``.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import cloudpickle

from shardscope.errors import LaunchError
from shardscope.runlog.files import read_bytes
from shardscope.runtime.record.status import printable
from shardscope.spec import Job, UserCode

CODE_FILE = "user_code.pkl"
_MOST_BYTES = 16 * 2**30
"""Maximum size of a code file, in bytes. It is high because functions may contain arrays."""
_written_here: set[str] = set()
"""Digests of the code files that this process has written."""


def pack(code: Mapping[str, UserCode]) -> bytes:
    """Pickle the functions of a job and return the content of its code file.

    Raises:
        LaunchError: The functions cannot be pickled.
    """
    functions = {field: value.function for field, value in code.items()}
    try:
        content = bytes(cloudpickle.dumps(functions))
    except Exception as error:
        names = ", ".join(f"{field}={value.name}" for field, value in code.items())
        raise LaunchError(
            f"{names} cannot be sent to the ranks ({error}); create objects that cannot be pickled, such as open "
            "files, inside the function"
        ) from error
    _written_here.add(digest_of(content))
    return content


def read_code(path: Path) -> bytes:
    """Return the content of a code file as bytes, without unpickling it.

    Raises:
        FileNotFoundError: The file does not exist.
        RunUnreadable: The path is not a regular file, or the file is too large.
    """
    return read_bytes(path, most=_MOST_BYTES)


def digest_of(content: bytes) -> str:
    """Return the SHA-256 digest of a code file's content, in hexadecimal."""
    return hashlib.sha256(content).hexdigest()


def is_of_this_process(content: bytes) -> bool:
    """Return whether this process has written a code file with exactly this content."""
    return digest_of(content) in _written_here


def with_code(job: Job, content: bytes, path: Path) -> Job:
    """Return the job with its functions, unpickled from a trusted code file. This runs the code in the file.

    Raises:
        LaunchError: The content is corrupt, needs a package that is not installed, or is not the code of this job.
    """
    try:
        functions = cloudpickle.loads(content)
    except Exception as error:  # the code may raise any exception
        reason = printable(f"{type(error).__name__}: {error}")
        raise LaunchError(
            f"{path} cannot be loaded ({reason}); give the functions again with job.replace(...)"
        ) from error
    if not _are_functions(functions, job):
        raise LaunchError(
            f"{path} does not contain the functions of this job; give them again with job.replace(...)"
        )
    return job.with_user_code(functions)


def _are_functions(value: Any, job: Job) -> bool:
    return isinstance(value, dict) and set(value) == set(job.user_code) and all(map(callable, value.values()))


def load_for_ranks(job: Job, path: Path, digest: str) -> Job:
    """Return the job with its functions, for a rank of the run that was launched with this code file.

    Args:
        job: The job as read from the run directory.
        path: The code file in the run directory.
        digest: Digest of the code file at the launch.

    Raises:
        LaunchError: The file has changed since the launch, or cannot be loaded.
    """
    content = read_code(path)
    if digest_of(content) != digest:
        raise LaunchError(f"{path} has changed since the launch, so it was not run; launch the job again")
    return with_code(job, content, path)
