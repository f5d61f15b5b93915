"""The probe: a few uncompressed steps of a job on its real ranks, at the machine's own speed."""

from __future__ import annotations

from statistics import median
from typing import NamedTuple

from shardscope.errors import SpecError
from shardscope.runlog.averages import WARM_UP_STEPS
from shardscope.runlog.spans import covered, finished_with_spans, lane_of
from shardscope.runlog.traffic import Event, Moved
from shardscope.runtime import Run, launch
from shardscope.spec import Compression, Job, LRSchedule
from shardscope.spec.job_parts import Record

PROBE_STEPS = 8
_OPEN = frozenset({"compression", "link", "steps", "name", "lr_schedule", "record"})
"""Fields in which a probe's job may differ: they only affect the traffic, or do not affect the step time."""

_PLAIN = "give an uncompressed run without a link, or none"


def probe_of(job: Job) -> Run:
    """Run the probe of a job and wait until it ends."""
    return launch(plain_job(job)).wait()


def plain_job(job: Job) -> Job:
    """Return the job of the probe: a few uncompressed steps without a link."""
    return job.replace(
        compression=Compression("none"), link=None, steps=PROBE_STEPS, name="probe", lr_schedule=LRSchedule("constant"),
        record=Record(),
    )  # fmt: skip


class Probed(NamedTuple):
    """Measurements of one step from a probe; medians over its steps."""

    compute_s: float
    """Time of the step without exposed communication, in seconds, on the rank that computes longest."""
    sent_bytes: float
    """Bytes sent by the rank that sends most."""
    talking_s: float
    """Communication time in seconds on the rank with the least of it, since that rank does not wait for others."""


def probed(job: Job, run: Run) -> Probed:
    """Evaluate a finished probe of a job.

    Args:
        job: The job.
        run: The finished probe.

    Raises:
        SpecError: The run is not an uncompressed run of this job without a link, or it has no step after the warm-up
            with the spans of all ranks.
    """
    _refuse_another(job, run)
    steps = steps_with_spans(run)
    return Probed(
        median(max(_alone(event) for event in row) for row in steps),
        median(max(Moved.of(event).sent_bytes for event in row) for row in steps),
        median(
            min(sum(end - start for start, end in lane_of(event, "communication")) for event in row)
            for row in steps
        ),
    )


def _refuse_another(job: Job, run: Run) -> None:
    if run.is_alive:
        raise SpecError(f"probe={run.id!r} is still running; wait for it with probe.wait()")
    its, asked = run.job, job.model_dump(mode="json")
    for field, value in its.model_dump(mode="json").items():
        if field not in _OPEN and value != asked[field]:
            raise SpecError(
                f"probe={run.id!r} ran with {field}={getattr(its, field)!r}, and the job has "
                f"{getattr(job, field)!r}; give a run of the same job, or none"
            )
    if its.compression.is_on:
        raise SpecError(f"probe={run.id!r} ran with compression={its.compression.name!r}; {_PLAIN}")
    if its.link is not None:
        raise SpecError(f"probe={run.id!r} ran on a link of {its.link.label}; {_PLAIN}")


def steps_with_spans(run: Run) -> list[list[Event]]:
    """Return the step events of each step after the warm-up for which every rank has recorded its spans."""
    rows = finished_with_spans(run.events(), run.job.world_size)
    whole = [row for row in rows if row[0]["step"] > WARM_UP_STEPS]
    if not whole:
        raise SpecError(
            f"probe={run.id!r} has no step after its first {WARM_UP_STEPS} with spans; give a longer run, or none"
        )
    return whole


def _alone(event: Event) -> float:
    """Return the time of a step without exposed communication, in seconds.

    Communication is exposed while this rank communicates and does not compute.
    """
    both = covered(lane_of(event, "compute") + lane_of(event, "communication"))
    return float(event["step_time_s"]) - both + covered(lane_of(event, "compute"))
