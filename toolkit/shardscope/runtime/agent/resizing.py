"""Handles requests for a different number of ranks, in the agent, after the previous ranks have ended.

    Run.resize ── control/resize ──▶ ranks save their state and end ──▶ agent takes the request, starts the next

The ranks end as if they had been asked to stop, so the agent checks why: a stop request takes precedence.
"""

from __future__ import annotations

import contextlib
import sys

from shardscope.runlog.files import OutOfReach, read_text
from shardscope.runlog.tail import read_events
from shardscope.runtime.agent.failure import Ending
from shardscope.runtime.record.rundir import RunDir
from shardscope.runtime.record.status import Cause
from shardscope.spec import Job
from shardscope.spec.units import plural


def cannot_start(run: RunDir, ending: Ending, began_t: float) -> bool:
    """Return whether the ranks of a resized run failed before their first step, so that the former number continues.

    Args:
        run: Directory of the run.
        ending: How the ranks ended.
        began_t: Time on the run's clock at which their start began.
    """
    is_over = (
        ending.cause in (Cause.REQUESTED, Cause.DIRECTORY_GONE, Cause.DRIVER_ENDED)
        or run.stop_request.exists()
    )
    if ending.state != "failed" or is_over:
        return False
    return not any(event["event"] == "step" and event["t"] >= began_t for event in read_events(run.path))


def next_size(run: RunDir, job: Job, world_size: int, ending: Ending) -> int | None:
    """Return the number of ranks that continue after `ending`; None if the run is over. Consumes the resize request.

    Args:
        run: Directory of the run.
        job: The job as it was launched.
        world_size: The last number of ranks.
        ending: How these ranks ended.
    """
    was_asked = ending.state == "stopped" and ending.cause is Cause.REQUESTED
    if not was_asked or run.stop_request.exists() or not run.resize_request.exists():
        return None
    taken = run.resize_request.with_name("resizing")
    run.resize_request.rename(taken)  # a newer request is for the next ranks
    run.stop_at.unlink(missing_ok=True)
    size = world_size
    try:
        size = job.at_size(int(read_text(taken))).world_size
    except (ValueError, OSError, OutOfReach) as error:  # not written by `Run.resize`, which checks it
        print(
            f"the run continues with {plural(size, 'rank')}, because control/resize is not valid: {error}",
            file=sys.stderr,
        )
    with contextlib.suppress(FileNotFoundError):
        taken.unlink()
    return size
