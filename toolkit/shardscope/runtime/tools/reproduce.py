"""Launch the job of an earlier run again, and compare the losses of the two runs bit by bit."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterator
from pathlib import Path

from shardscope.runtime.launcher.driver import launch
from shardscope.runtime.record.load_job import load_job
from shardscope.runtime.record.provenance import Provenance
from shardscope.runtime.record.run import Run


class EnvironmentDiffers(UserWarning):
    """Warning that the environment differs from the one in which the run was launched, so that losses may differ."""


def reproduce(
    run: Run | str | Path,
    *,
    trust_code: bool = False,
    root: str | Path | None = None,
    preflight: bool = True,
) -> Run:
    """Launch the job of a run again, with the same seeds, data order and code. Return without waiting for it.

    On the same machine with the same versions, losses are bit-identical. The exceptions are asynchronous and
    bounded-staleness parameter servers, and GPU kernels that sum in no fixed order. A warning is issued for each
    difference between the environment of the run and this one.
    A run on an emulated cluster is launched on a cluster with the same settings.

    Args:
        run: A run, or its name or path.
        trust_code: Whether to load the user's own functions from a file that this process did not write, which runs the
            code in it (see `load_job`).
        root: Folder of the runs; None uses ``$SHARDSCOPE_RUNS`` or ``./runs``.
        preflight: Whether to reject a job that would not fit in this machine's memory (see `launch`).

    Raises:
        RunNotFound: The run does not exist.
        RunUnreadable: The run cannot be read.
        UntrustedCode: The job has code, and `trust_code` is not set.
        LaunchError: The job cannot be launched here.

    Example:
        >>> again = ss.reproduce("20260102-030405-mine").wait()  # doctest: +SKIP
        >>> first_difference("20260102-030405-mine", again)  # None: bit-identical  # doctest: +SKIP
    """
    earlier = Run.attach(run, root)
    job = load_job(earlier, trust_code=trust_code)
    for difference in differences(earlier):
        warnings.warn(f"{earlier.id}: {difference}", EnvironmentDiffers, stacklevel=2)
    return launch(job, earlier.cluster, root=root, preflight=preflight)


def differences(run: Run) -> Iterator[str]:
    """Yield a sentence for each difference to the run's environment that may change its losses."""
    then = run.provenance
    if then is None:
        yield "its environment was not recorded, as in runs from earlier versions"
    else:
        yield from then.differences(Provenance.here(command=sys.orig_argv))
    resumed = next(iter(run.events("resume", rank=0)), None)
    if resumed is not None:
        yield f"it resumed from step {resumed['step']} of another run, and is launched again from its first step"


def first_difference(run: Run | str | Path, other: Run | str | Path) -> int | None:
    """Return the first step at which the losses of two runs differ on any rank; None if they are bit-identical.

    Steps that only one of the runs has reached are not compared.

    Args:
        run: A run, or its name or path.
        other: The run to compare it with, or its name or path.

    Raises:
        RunNotFound: A run does not exist.
        RunUnreadable: A run cannot be read.
    """
    one, two = (_losses(Run.attach(each)) for each in (run, other))
    return min(
        (step for step, rank in one.keys() & two.keys() if one[step, rank] != two[step, rank]), default=None
    )


def _losses(run: Run) -> dict[tuple[int, int], object]:
    """Return losses by step and rank; non-finite losses are strings, so that NaN compares equal."""
    return {(event["step"], event["rank"]): event["loss"] for event in run.events("step")}
