"""The events of one step of a job, from its prediction alone."""

from __future__ import annotations

from collections.abc import Iterator

from shardscope.analytic.communication.plan import StepPlan
from shardscope.analytic.memory.held import keeps_gradients
from shardscope.calibration.host_calibration import AnyCalibration
from shardscope.errors import SpecError
from shardscope.prediction.job import JobPrediction, predict_job
from shardscope.runlog.step_events import MemoryPoint, StepEvent, StepEvents, in_order
from shardscope.simulator.exchanges import Cargo, merged
from shardscope.simulator.flow import Piped
from shardscope.simulator.memory import Change, lockstep_changes, memory_points
from shardscope.simulator.parts import StepTimes
from shardscope.simulator.together import Lockstep
from shardscope.spec import Job
from shardscope.spec.cluster import Cluster

MOST_RANKS = 64
"""Largest number of ranks whose events are listed."""


def step_events(
    job: Job, cluster: Cluster | None = None, *, calibration: AnyCalibration | None = None
) -> StepEvents:
    """Return the events of one training step from a prediction, without running anything.

    The step takes as long as ``ss.predict(job, cluster)`` says, and each rank sends as many bytes. Messages meet no
    contention, and all rounds of a collective take a time in proportion to their bytes.

    Args:
        job: The job, with at most 64 ranks.
        cluster: The cluster that it runs on; None for this machine.
        calibration: The cluster's constants, as for `predict`.

    Example:
        >>> import shardscope as ss
        >>> step = ss.simulate.step_events(ss.Job(model="mlp", data="digits", strategy="ring", world_size=4))
        >>> len(step.messages), step.sent_bytes
        (24, [260408, 260412, 260416, 260412])

    Raises:
        SpecError: There are more than 64 ranks, the strategy does not list its messages, or the job is invalid.
    """
    return step_events_of(predict_job(job, cluster, calibration))


def step_events_of(prediction: JobPrediction) -> StepEvents:
    """Return the events of one step of a predicted job; see `step_events`."""
    job = prediction.job
    if job.world_size > MOST_RANKS:
        raise SpecError(
            f"world_size={job.world_size} is too many ranks to draw one by one; use at most {MOST_RANKS}"
        )
    if prediction.time is None:
        raise SpecError(f"this job has no step time: {prediction.note}")
    plan: StepPlan | None = job.strategy.plan(prediction.step)
    if plan is None:
        raise SpecError(
            f"strategy={job.strategy.name!r} does not list its messages one by one; define its `plan`, or use another "
            "strategy, such as 'ring'"
        )
    _check_bytes(prediction, plan)
    exchanges, group = merged(plan.exchanges)
    plan = plan._replace(exchanges=tuple(exchanges))
    times = StepTimes.of(prediction.time)
    events, memory = (_piped if plan.flow else _together)(prediction, plan, times)
    return StepEvents(
        label=job.label,
        origin="predicted",
        arrangement=job.strategy.arrangement(job.world_size),
        world_size=job.world_size,
        step=prediction.step.number,
        step_time_s=prediction.time.value,
        events=in_order([*events, *_fixed_cost(times, job.world_size)]),
        memory=memory,
        roles=tuple(job.strategy.role(rank, job.world_size) for rank in range(job.world_size)),
        note=_note(times, group),
    )


def _fixed_cost(times: StepTimes, ranks: int) -> list[StepEvent]:
    """Return the part of the step that no pass or message accounts for, at its end."""
    start = times.total - times.rest
    return [StepEvent(r, "compute", "fixed cost", start, times.total) for r in range(ranks) if times.rest]


def cargo_of(job: Job) -> Cargo:
    """Return the function that names what a collective of a job carries."""
    if job.compression.period > 1:
        return lambda _: "parameters"
    cargo: Cargo = job.strategy.cargo
    return cargo


def _together(
    prediction: JobPrediction, plan: StepPlan, times: StepTimes
) -> tuple[list[StepEvent], tuple[MemoryPoint, ...]]:
    job, ranks = prediction.job, prediction.job.world_size
    busy = [work.computing > 0 for work in job.strategy.work(prediction.step)]
    step = Lockstep(plan, times, prediction.step.micro_batches, busy, cargo_of(job))
    events = list(step.events())
    grows = not keeps_gradients(job.strategy.held_stage, ranks)
    changes = lockstep_changes(prediction.kinds, step.passes, ranks, grows=grows)
    kinds = ["activations", "gathered", *(["gradients"] if grows else [])]
    return events, memory_points(prediction.kinds, ranks, changes, kinds)


def _piped(
    prediction: JobPrediction, plan: StepPlan, times: StepTimes
) -> tuple[list[StepEvent], tuple[MemoryPoint, ...]]:
    ranks = prediction.job.world_size
    step = Piped(plan, times, ranks, cargo_of(prediction.job))
    changes = [*_activations(step), *_gradients(step, prediction)]
    return list(step.events()), memory_points(
        prediction.kinds, ranks, changes, ["activations", "gathered", "gradients"]
    )


def _activations(step: Piped) -> Iterator[Change]:
    return ((rank, at, "activations", size) for rank, at, size in step.activations())


def _gradients(step: Piped, prediction: JobPrediction) -> Iterator[Change]:
    """Yield the appearance of each rank's gradients in its first backward pass, and their end after the update."""
    if "gradients" not in prediction.kinds:
        return
    for rank, row in enumerate(step.timeline.rows):
        first = next(each for each in row if each.op.op in "BI")
        yield rank, step.at(first.end, 0), "gradients", float(prediction.kinds["gradients"][rank])


def _check_bytes(prediction: JobPrediction, plan: StepPlan) -> None:
    """Reject a plan that does not send the predicted bytes, as if these depend on the gradients' values."""
    sent = [0] * prediction.job.world_size
    for exchange in plan.exchanges:
        for rank, size in enumerate(exchange.whole if exchange.whole is not None else ()):
            sent[rank] += int(size)
        for move in (move for each in exchange.rounds for move in each.moves):
            sent[move.source] += move.num_bytes
    if plan.flow is not None:
        for rank, size in enumerate(plan.flow.sent_bytes(prediction.job.world_size)):
            sent[rank] += size
    predicted = prediction.sent_bytes
    if predicted is None or sent != predicted.tolist():
        raise SpecError(
            f"the messages of strategy={prediction.job.strategy.label!r} with "
            f"compression={prediction.job.compression.label!r} cannot be listed one by one, because their sizes depend "
            "on the values of the gradients; use another compression"
        )


def _note(times: StepTimes, group: int) -> str:
    sentences = ["Messages meet no contention; activations are assumed to grow evenly during a pass."]
    if times.communication is None:
        sentences.append("Communication that computation hides is spread evenly over the passes.")
    else:
        sentences.append("No overlap of computation and communication is assumed.")
    if group > 1:
        sentences.append(f"Up to {group} neighbouring collectives are drawn as one.")
    return " ".join(sentences)
