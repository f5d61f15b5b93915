"""The probe: a few uncompressed steps of a job on its real ranks, at the machine's own speed."""

from __future__ import annotations

from statistics import median

from shardscope.errors import SpecError
from shardscope.runtime import Run, launch
from shardscope.runtime.tail import Event
from shardscope.spec import Compression, Job
from shardscope.spec.job import Record
from shardscope.spec.schedule import Schedule

PROBE_STEPS = 8
WARM_UP = 2
"""Steps at the start that are not looked at."""
_OPEN = frozenset({"compression", "link", "steps", "name", "schedule", "record"})
"""Fields in which a probe's job may differ: they change what is sent, or nothing that a step takes its time for."""

_PLAIN = "give an uncompressed run without a link, or none"


def probe_of(job: Job) -> Run:
    """Run the probe of a job, and wait for it."""
    return launch(plain_job(job)).wait()


def plain_job(job: Job) -> Job:
    """The few steps that are run."""
    return job.replace(
        compression=Compression(), link=None, steps=PROBE_STEPS, name="probe", schedule=Schedule(), record=Record()
    )  # fmt: skip


def probed(job: Job, run: Run) -> tuple[float, float]:
    """Seconds that a step computes, on the slowest rank, and bytes a second that a rank sends while it communicates.

    Raises:
        SpecError: The run is none of this job uncompressed and unpaced, or has no steps to look at.
    """
    _refuse_another(job, run)
    steps = _measured(run)
    compute = median(max(_seconds(event, "compute") for event in row) for row in steps)
    sent = median(max(_sent(event) for event in row) for row in steps)
    talking = median(min(_seconds(event, "communication") for event in row) for row in steps)
    return compute, sent / talking


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


def _measured(run: Run) -> list[list[Event]]:
    """Each step past the warm-up that every rank has written down with its spans."""
    steps: dict[int, list[Event]] = {}
    for event in run.events("step"):
        if event["step"] > WARM_UP and event.get("spans"):
            steps.setdefault(event["step"], []).append(event)
    whole = [row for row in steps.values() if len(row) == run.job.world_size]
    if not whole:
        raise SpecError(
            f"probe={run.id!r} has no step after its first {WARM_UP} with spans; give a longer run, or none"
        )
    return whole


def _seconds(event: Event, lane: str) -> float:
    return float(sum(end - start for kind, _, start, end, _ in event["spans"] if kind == lane))


def _sent(event: Event) -> float:
    return float(sum(row["sent_bytes"] for row in event["traffic"].values()))
