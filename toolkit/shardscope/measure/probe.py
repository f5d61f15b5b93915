"""The probe: a short uncompressed run of a job without an emulated link."""

from __future__ import annotations

from statistics import median
from typing import NamedTuple

from shardscope.errors import SpecError
from shardscope.runlog.schema import Event, Moved
from shardscope.runlog.spans import covered, finished_with_spans, lane_of
from shardscope.runlog.steps import WARM_UP_STEPS
from shardscope.runtime import Run, launch
from shardscope.spec import Compression, Job, Link, LRSchedule
from shardscope.spec.job_parts import Record

PROBE_STEPS = 8
_OPEN = frozenset({"compression", "link", "steps", "name", "lr_schedule", "record"})
"""Fields in which the probe's job may differ from the job: they only affect traffic, or do not affect step time."""

_PLAIN = "pass an uncompressed run with link=None, or omit probe"


def probe_of(job: Job) -> Run:
    """Run the probe for a job, wait until it ends, and return it."""
    return launch(plain_job(job), made_by="probe").wait()


def plain_job(job: Job) -> Job:
    """Return the job that the probe runs: a few uncompressed steps without a link."""
    return job.replace(
        compression=Compression("none"), link=None, steps=PROBE_STEPS, name="probe", lr_schedule=LRSchedule("constant"),
        record=Record(),
    )  # fmt: skip


class Probed(NamedTuple):
    """Measurements of a typical step: medians over the steps of a probe."""

    compute_s: float
    """Step time without exposed communication, in seconds, on the rank where it is longest."""
    sent_bytes: float
    """Bytes sent by the rank that sends most."""
    communication_s: float
    """Communication time, in seconds, on the rank where it is shortest, since that rank does not wait for others."""


def probed(job: Job, run: Run) -> Probed:
    """Return the measurements of a typical step from a finished probe of a job.

    Args:
        job: The job.
        run: The finished probe.

    Raises:
        SpecError: The run is not an uncompressed run of this job without a link, or it has no step after the warm-up
            with the spans of all ranks.
    """
    _check_probe(job, run)
    steps = steps_with_spans(run)
    return Probed(
        median(max(_unexposed_seconds(event) for event in row) for row in steps),
        median(max(Moved.of(event).sent_bytes for event in row) for row in steps),
        median(
            min(sum(end - start for start, end in lane_of(event, "communication")) for event in row)
            for row in steps
        ),
    )


def _check_probe(job: Job, run: Run) -> None:
    if run.is_alive:
        raise SpecError(f"probe={run.id!r} is still running; wait for it with probe.wait()")
    its, asked = run.job, job.model_dump(mode="json")
    for field, value in its.model_dump(mode="json").items():
        if field not in _OPEN and value != asked[field]:
            raise SpecError(
                f"probe={run.id!r} ran with {field}={getattr(its, field)!r}, but the job has "
                f"{getattr(job, field)!r}; pass a run of the same job, or omit probe"
            )
    if its.compression.is_on:
        raise SpecError(f"probe={run.id!r} ran with compression={its.compression.name!r}; {_PLAIN}")
    link = link_of_run(run)
    if link is not None:
        raise SpecError(f"probe={run.id!r} ran on an emulated link ({link.label}); {_PLAIN}")


def link_of_run(run: Run) -> Link | None:
    """Return the emulated link of a run's ranks: its job's, or its emulated cluster's slowest; None if it has none.

    Ranks on a single emulated node have none.
    """
    return run.job.link if run.cluster is None else run.cluster.link


def steps_with_spans(run: Run) -> list[list[Event]]:
    """Return the step events of all ranks for each step after the warm-up whose spans every rank has recorded."""
    rows = finished_with_spans(run.events(), run.job.world_size)
    whole = [row for row in rows if row[0]["step"] > WARM_UP_STEPS]
    if not whole:
        raise SpecError(
            f"probe={run.id!r} has no spans of all ranks after its {WARM_UP_STEPS} warm-up steps; pass a longer "
            "run, or omit probe"
        )
    return whole


def _unexposed_seconds(event: Event) -> float:
    """Return a rank's step time without exposed communication, in seconds.

    Communication is exposed while the rank communicates and does not compute.
    """
    both = covered(lane_of(event, "compute") + lane_of(event, "communication"))
    return float(event["step_time_s"]) - both + covered(lane_of(event, "compute"))
