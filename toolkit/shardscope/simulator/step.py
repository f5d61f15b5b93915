"""The events of one step of a job, from its prediction alone, and the memory of each rank while it runs.

Parameters, optimizer state and buffers are constant. Activations grow evenly during each forward pass up to their
peak, and shrink during the backward pass; in a pipeline, they follow the schedule. Gradients that stay in communication
buckets are constant, other gradients grow during the first backward pass. Gathered parameters change with every
all-gather, in proportion to its size.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby

from shardscope.analytic.communication.plan import Exchange, StepPlan
from shardscope.analytic.memory.held import keeps_gradients
from shardscope.calibration.host_calibration import AnyCalibration
from shardscope.errors import SpecError
from shardscope.prediction.job import JobPrediction, predict_job
from shardscope.runlog.schema import MEMORY_KINDS
from shardscope.runlog.step_events import MemoryPoint, StepEvent, StepEvents, in_order
from shardscope.simulator.flow import Piped
from shardscope.simulator.parts import Cargo, StepTimes, busiest_bytes, merged, timed
from shardscope.spec import Job
from shardscope.spec.cluster import Cluster

MOST_RANKS = 64
"""Maximum number of ranks whose events are listed."""


def step_events(
    job: Job, cluster: Cluster | None = None, *, calibration: AnyCalibration | None = None
) -> StepEvents:
    """Return the events of one training step from a prediction, without running anything.

    The step time and the bytes that each rank sends are those of ``ss.predict(job, cluster)``. There is no contention
    between messages, and each round of a collective takes a time proportional to its bytes.

    Args:
        job: The job, with at most 64 ranks.
        cluster: The cluster that the job runs on; None for this machine.
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
    grows = not keeps_gradients(job.strategy.held_stage, job.num_state_ranks)
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
    """Yield the allocation of each rank's gradients, at the end of its first backward pass."""
    if "gradients" not in prediction.kinds:
        return
    for place, row in enumerate(step.timeline.rows):
        first = next(each for each in row if each.op.op in "BI")
        for rank in step.flow.ranks(place):
            yield rank, step.at(first.end, 0), "gradients", float(prediction.kinds["gradients"][rank])


def _check_bytes(prediction: JobPrediction, plan: StepPlan) -> None:
    """Reject a plan that does not send the predicted bytes, for example because they depend on gradient values."""
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
    sentences = ["Messages do not slow each other down; activations grow evenly during a pass."]
    if times.communication is None:
        sentences.append("Communication that overlaps with computation is spread evenly over the passes.")
    else:
        sentences.append("Computation and communication do not overlap.")
    if group > 1:
        sentences.append(f"Up to {group} successive collectives are drawn as one.")
    return " ".join(sentences)


@dataclass
class TimedPass:
    """One pass of a step, and the times at which it runs.

    Attributes:
        phase: ``data``, ``forward``, ``backward`` or ``optimizer``.
        micro_batch: Number of the micro-batch, from 0.
        seconds: Time that the pass computes.
        start: Start of the pass, in seconds.
        end: End of the pass and of its exchanges, in seconds.
        gathers: End time and bytes of each all-gather of parameters.
        computing: Start and end of each part of the pass, between its exchanges.
    """

    phase: str
    micro_batch: int
    seconds: float
    start: float = 0.0
    end: float = 0.0
    gathers: list[tuple[float, int]] = field(default_factory=list)
    computing: list[tuple[float, float]] = field(default_factory=list)

    def at(self, share: float) -> float:
        """Return the time at which a fraction of the pass has been computed."""
        left = share * sum(end - start for start, end in self.computing)
        for start, end in self.computing:
            if left <= end - start:
                return start + left
            left -= end - start
        return self.computing[-1][1] if self.computing else self.end


class Lockstep:
    """Builds the events of a step in which every pass runs on all ranks, as with replicas, parameter servers and ZeRO.

    The passes run one after another. If the prediction assumes no overlap, a pass pauses while an exchange runs, so the
    step takes exactly the sum of its parts. For layouts, the prediction hides exchanges behind computation and contains
    only the exposed time; exchanges are then spread evenly over the passes.
    """

    def __init__(
        self, plan: StepPlan, times: StepTimes, micro_batches: int, busy: Sequence[bool], cargo: Cargo
    ) -> None:
        self.exchanges, self.times, self.busy, self.cargo = plan.exchanges, times, busy, cargo
        self.updating = range(len(busy)) if plan.updating is None else plan.updating
        self.micro_batches = micro_batches
        self.passes = [
            TimedPass("data", 0, times.data),
            *(
                TimedPass(phase, k, seconds / micro_batches)
                for k in range(micro_batches)
                for phase, seconds in (("forward", times.forward), ("backward", times.backward))
            ),
            TimedPass("codec", 0, times.codec),
            TimedPass("optimizer", 0, times.optimizer),
        ]
        totals: dict[str, int] = {}
        for each in plan.exchanges:
            totals[each.collective] = totals.get(each.collective, 0) + busiest_bytes(each)
        self._totals = totals

    def events(self) -> Iterator[StepEvent]:
        """Yield all events, and fill in the times of `passes`."""
        now = 0.0
        for each in self.passes:
            each.start = now
            mine = [e for e in self.exchanges if _belongs(e, each)]
            mine.sort(key=lambda e: e.when.part)
            yield from (
                self._overlapped(each, mine) if self.times.communication is None else self._paused(each, mine)
            )
            now = each.end

    def _ranks(self, phase: str) -> Sequence[int]:
        return (
            self.updating if phase == "optimizer" else [r for r, is_busy in enumerate(self.busy) if is_busy]
        )

    def _computing(self, each: TimedPass, start: float, end: float) -> Iterator[StepEvent]:
        item = f"micro-batch {each.micro_batch}" if self.micro_batches > 1 and each.phase in _PASSES else ""
        if end > start:
            each.computing.append((start, end))
            for rank in self._ranks(each.phase):
                yield StepEvent(
                    rank, "codec" if each.phase == "codec" else "compute", each.phase, start, end, item=item
                )

    def _paused(self, each: TimedPass, exchanges: Sequence[Exchange]) -> Iterator[StepEvent]:
        now, done = each.start, 0.0
        for exchange in exchanges:
            part = max(done, exchange.when.part)
            until = now + (part - done) * each.seconds
            yield from self._computing(each, now, until)
            now, done = until, part
            end = now + self._seconds(exchange)
            yield from timed(exchange, now, end, self.cargo, len(self.busy))
            if exchange.gathers:
                each.gathers.append((end, exchange.num_bytes))
            now = end
        each.end = now + (1.0 - done) * each.seconds
        yield from self._computing(each, now, each.end)

    def _seconds(self, exchange: Exchange) -> float:
        """Return the exchange's share of its collective's predicted time, by the bytes of its busiest rank."""
        assert self.times.communication is not None
        total = self._totals[exchange.collective] or 1
        return self.times.communication.get(exchange.collective, 0.0) * busiest_bytes(exchange) / total

    def _overlapped(self, each: TimedPass, exchanges: Sequence[Exchange]) -> Iterator[StepEvent]:
        computed = each.start + each.seconds
        is_last = each.phase == "backward" and each.micro_batch == self.micro_batches - 1
        each.end = computed + self.times.exposed * is_last
        yield from self._computing(each, each.start, computed)
        first = min([0.5, *(exchange.when.part for exchange in exchanges)])
        now, whole = each.start + first * each.seconds, sum(map(busiest_bytes, exchanges)) or 1
        room = each.end - now
        for exchange in exchanges:
            end = now + room * busiest_bytes(exchange) / whole
            yield from timed(exchange, now, end, self.cargo, len(self.busy))
            if exchange.gathers:
                each.gathers.append((end, exchange.num_bytes))
            now = end


_PASSES = ("forward", "backward")


def _belongs(exchange: Exchange, each: TimedPass) -> bool:
    when = exchange.when
    return when.phase == each.phase and when.micro_batch == each.micro_batch


_PIECES = 8
"""Number of parts in which activations and gradients grow or shrink during a pass."""
Change = tuple[int, float, str, float]
"""A rank, a time in seconds, a type of memory, and its bytes from then on."""
Peaks = Mapping[str, Sequence[float]]


def memory_points(
    peaks: Peaks, ranks: int, changes: Iterable[Change], changing: Iterable[str]
) -> tuple[MemoryPoint, ...]:
    """Return the memory of each rank over time: at the start of the step, and after each change.

    Args:
        peaks: Peak bytes of each type of memory on each rank.
        ranks: Number of ranks.
        changes: All changes of memory.
        changing: Types of memory that are 0 at the start of the step; the others start at their peak.
    """
    empty = set(changing)
    by_rank: dict[int, list[Change]] = {rank: [] for rank in range(ranks)}
    for change in changes:
        by_rank[change[0]].append(change)
    points = []
    for rank, own in by_rank.items():
        held = {
            kind: 0.0 if kind in empty or kind not in peaks else float(peaks[kind][rank])
            for kind in MEMORY_KINDS
        }
        points.append(_point(rank, 0.0, held))
        for at, same in groupby(sorted(own, key=lambda change: change[1]), key=lambda change: change[1]):
            held |= {kind: size for _, _, kind, size in same}
            points.append(_point(rank, at, held))
    return tuple(sorted(points, key=lambda point: (point.at_s, point.rank)))


def _point(rank: int, at: float, held: Mapping[str, float]) -> MemoryPoint:
    return MemoryPoint(rank, at, tuple(round(held[kind]) for kind in MEMORY_KINDS))


def lockstep_changes(
    peaks: Peaks, passes: Sequence[TimedPass], ranks: int, *, grows: bool
) -> Iterator[Change]:
    """Yield the changes of activations, gathered parameters and, if `grows`, gradients in a step of `Lockstep`."""
    first = min((each.micro_batch for each in passes if each.phase == "backward"), default=0)
    for rank in range(ranks):
        for each in passes:
            if each.phase in ("forward", "backward"):
                yield from _ramp(rank, each, "activations", peaks, falls=each.phase == "backward")
                yield from _gathered(rank, each, passes, peaks)
            if grows and each.phase == "backward" and each.micro_batch == first:
                yield from _ramp(rank, each, "gradients", peaks, falls=False)
        yield rank, passes[-1].end, "gathered", 0.0
        if grows:
            yield rank, passes[-1].end, "gradients", 0.0


def _ramp(rank: int, each: TimedPass, kind: str, peaks: Peaks, *, falls: bool) -> Iterator[Change]:
    if kind not in peaks:
        return
    for k in range(1, _PIECES + 1):
        share = 1 - k / _PIECES if falls else k / _PIECES
        yield rank, each.at(k / _PIECES), kind, float(peaks[kind][rank]) * share


def _gathered(rank: int, each: TimedPass, passes: Sequence[TimedPass], peaks: Peaks) -> Iterator[Change]:
    largest = max((size for other in passes for _, size in other.gathers), default=0)
    if not largest or "gathered" not in peaks:
        return
    for at, size in each.gathers:
        yield rank, at, "gathered", float(peaks["gathered"][rank]) * size / largest
    if each.phase == "backward":
        yield rank, each.end, "gathered", 0.0
