"""Load a job from a run directory or a file, with the user's code if it is trusted."""

from __future__ import annotations

import os
from pathlib import Path

from shardscope.errors import UntrustedCode
from shardscope.runtime.record.code_file import CODE_FILE, is_of_this_process, read_code, with_code
from shardscope.runtime.record.run import Run
from shardscope.runtime.record.rundir import find, read_job_file
from shardscope.runtime.record.status import printable
from shardscope.spec import Job
from shardscope.spec.observed import ObservedJob


def load_job(where: Run | str | Path, *, trust_code: bool = False, root: str | Path | None = None) -> Job:
    """Return the job of a run or a job file, with the user functions stored next to it.

    A job whose model, data and loss come from the catalogue has no code and is simply read. User functions are code:
    without `trust_code` they are loaded only if this process itself wrote exactly that file when it launched the job.
    Any other file, even from a run that you launched yesterday, may have been changed or placed there by somebody else,
    and requires ``trust_code=True``. Besides this function, only the ranks of a run load code from its directory.

    Args:
        where: A run, its name or path, or the path of a job file.
        trust_code: Whether to load functions from a file that this process did not write. This runs the code in it.
        root: Folder of the runs; None uses ``$SHARDSCOPE_RUNS`` or ``./runs``.

    Raises:
        RunNotFound: The run or file does not exist.
        RunUnreadable: The run or file cannot be read.
        UntrustedCode: The job has code, and `trust_code` is not set.
        LaunchError: The job's code cannot be loaded in this process.
        SpecError: The run is an observed training loop; its directory does not contain the training script.

    Example:
        >>> ss.launch(ss.load_job("20260102-030405-mine", trust_code=True))  # doctest: +SKIP
    """
    file = _file_of(where, root)
    job = read_job_file(file, printable(str(file)))
    if isinstance(job, ObservedJob):
        job.require_code()
    return add_code(job, file, trust_code=trust_code)


def add_code(job: Job, file: Path, *, trust_code: bool) -> Job:
    """Return the job with the functions stored next to its file; unchanged if there are none.

    Args:
        job: The job as read from the file.
        file: The job file.
        trust_code: Whether to load functions that this process did not write.

    Raises:
        UntrustedCode: This process did not write the functions, and `trust_code` is not set.
        LaunchError: The functions cannot be loaded in this process.
    """
    if all(code.is_here for code in job.user_code.values()):
        return job
    code = file.with_name(CODE_FILE)
    try:
        content = read_code(code)
    except FileNotFoundError:  # the user must give the functions before a launch
        return job
    if not (trust_code or is_of_this_process(content)):
        raise UntrustedCode(_question(file, code, job, len(content)))
    return with_code(job, content, code)


def _file_of(where: Run | str | Path, root: str | Path | None) -> Path:
    if isinstance(where, Run):
        return where.path / "job.json"
    is_file = os.path.isfile(where)  # noqa: PTH113 - Path.is_file raises where a name is too long
    return Path(where).resolve() if is_file else find(where, root).path / "job.json"


def _question(file: Path, code: Path, job: Job, size: int) -> str:
    names = ", ".join(f"{field}={value.name!r}" for field, value in job.user_code.items())
    return (
        f"{printable(str(file))} contains code: {names} in {code.name} next to it ({size:,} bytes); loading "
        f"{code.name} runs any code in it; if you trust it, pass trust_code=True (--trust-code in a shell), or give "
        "the functions again with job.replace(...)"
    )
