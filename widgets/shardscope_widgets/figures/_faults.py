"""Faults of a run: the activity of each rank between failures, the lost steps, and the fraction of useful time.

All times are in seconds from the first event of any rank.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from math import inf
from typing import NamedTuple

from shardscope.runlog.restarts import Restart
from shardscope.runlog.schema import Event
from shardscope_widgets.attempts import Attempt, Attempts
from shardscope_widgets.trace import Trace
from shardscope_widgets.words import duration_text, listed, plural

START, TRAINING, RESIZE = "start", "training", "resize"
LOST, DETECTION, RESTART = "lost work", "detection", "restart"
SOURCES = {"disk": "on disk", "replica": "in the memory of another rank"}
"""Texts for the location of the state from which training continues, by the location's name in events."""
MOST_POINTS = 300
"""Maximum number of points of one line of progress."""
MOST_CHECKPOINTS = 60
"""Maximum number of checkpoints that are marked; the newest are kept."""
_MOST_TOLD = 3
"""Maximum number of failures that are described individually."""


class FaultBar(NamedTuple):
    """Activity of a rank over a period: start, training, training of lost steps, failure detection, restart, or resize.

    The first and last step are those that ended in this period; both are 0 if there are none.
    """

    rank: int
    kind: str
    start_s: float
    end_s: float
    first_step: int = 0
    last_step: int = 0


class Incident(NamedTuple):
    """A failure and its recovery.

    Attributes:
        cause: What failed, in words.
        rank: The rank that failed first; None if it is unknown.
        failed_s: Time of the failure.
        detected_s: Time at which the agent detected the failure.
        again_s: Time from which all ranks trained again; None until then.
        last_step: The last step that any rank had finished.
        resumed: Step of the checkpoint from which training continued; 0 for the beginning.
        source: Where the state came from: ``disk``, ``replica`` or ``start``.
        num_lost: Number of finished steps that had to be trained again.
        before: Number of ranks before the failure; 0 if unknown.
        after: Number of ranks after the restart; 0 until then.
    """

    cause: str
    rank: int | None
    failed_s: float
    detected_s: float
    again_s: float | None
    last_step: int
    resumed: int
    source: str
    num_lost: int
    before: int = 0
    after: int = 0


class FaultMark(NamedTuple):
    """An injected fault that was not followed by a restart, such as a slow rank."""

    rank: int
    at_s: float
    kind: str
    text: str


class Progress(NamedTuple):
    """Steps over time from one start of the ranks to the next; steps after `kept` were lost."""

    times_s: tuple[float, ...]
    steps: tuple[int, ...]
    kept: int


class FaultsInfo(NamedTuple):
    """The timeline of one run.

    Attributes:
        label: Name of the run.
        world_size: Number of ranks that have a row.
        bars: Activities of all ranks, in order of time.
        incidents: Failures with a restart, in order of time.
        marks: Other injected faults, in order of time.
        resizes: Changes of the number of ranks that no failure caused, in order of time.
        progress: Steps over time, a line from each start of the ranks to the next.
        saved: Steps of the newest checkpoints, and when each was complete.
        end_s: Time of the newest event.
        wall_s: Time from when the first rank was ready to train to the newest event (`RunLog.wall_s`); 0 before that.
        num_lost: Number of finished steps that had to be trained again.
        goodput: Fraction of `wall_s` spent on steps that were not lost (`RunLog.goodput`); None before the first step.
    """

    label: str
    world_size: int
    bars: tuple[FaultBar, ...]
    incidents: tuple[Incident, ...]
    marks: tuple[FaultMark, ...]
    resizes: tuple[Resized, ...]
    progress: tuple[Progress, ...]
    saved: tuple[tuple[int, float], ...]
    end_s: float
    wall_s: float
    num_lost: int
    goodput: float | None

    def seconds(self, kind: str) -> float:
        """Return the time spent on resizes, failure detection, restarts or lost work, in seconds; overlaps count once.

        These are times of the run, not sums or means over ranks, because the number of ranks changes.
        """
        if kind == RESIZE:
            return sum(each.again_s - each.at_s for each in self.resizes if each.again_s is not None)
        if kind == DETECTION:
            return sum(max(0.0, each.detected_s - each.failed_s) for each in self.incidents)
        if kind == RESTART:
            ends = [*(each.failed_s for each in self.incidents[1:]), self.end_s]  # a restart can fail, too
            return sum(
                max(0.0, (end if each.again_s is None else each.again_s) - each.detected_s)
                for each, end in zip(self.incidents, ends, strict=False)
            )
        total, counted = 0.0, -inf
        for bar in self.bars:  # in order of time
            if bar.kind == kind:
                end = min(
                    [bar.end_s, *(each.failed_s for each in self.incidents if each.failed_s >= bar.start_s)]
                )
                total += max(0.0, end - max(bar.start_s, counted))
                counted = max(counted, end)
        return total

    def reached_s(self, step: int) -> float | None:
        """Return when the run first reached a step; None if the step is not among the drawn points."""
        times = (
            time
            for line in self.progress
            for time, each in zip(line.times_s, line.steps, strict=True)
            if each == step
        )
        return next(times, None)


def faults_info(trace: Trace) -> FaultsInfo:
    """Return the timeline of a run so far."""
    attempts = trace.attempts
    zero = attempts.begun or 0.0
    end = max((each.last for each in attempts), default=zero) - zero
    incidents = [_incident(trace, number, zero) for number in range(len(trace.restarts))]
    resizes = resized(attempts, [restart.failed_t for restart in trace.restarts])
    bars = [
        bar
        for attempt in attempts
        for bar in _bars(attempt, attempts, incidents, resizes, end)
        if bar.end_s > bar.start_s
    ]
    saved = sorted(attempts.saved.items())[-MOST_CHECKPOINTS:]
    return FaultsInfo(
        trace.label,
        max([trace.world_size, *(rank + 1 for rank in attempts.of_rank)]),
        tuple(sorted(bars, key=lambda bar: (bar.start_s, bar.rank))),
        tuple(incidents),
        tuple(_marks(trace, zero)),
        tuple(resizes),
        tuple(_progress(attempts, incidents, resizes, zero)),
        tuple((step, t - zero) for step, t in saved),
        end,
        trace.wall_s or 0.0,
        trace.lost_steps,
        trace.goodput,
    )


def _incident(trace: Trace, number: int, zero: float) -> Incident:
    restart = trace.restarts[number]
    since = trace.restarts[number - 1].t if number else 0.0
    before = [each for each in trace.attempts if since <= each.begun < restart.t]
    after = [each for each in trace.attempts.of_rank.get(0, ()) if each.begun >= restart.t]
    ranks = together(trace.attempts, after[0]) if after else []
    again = began_to_train(ranks)
    failed = [each for each in before if each.rank == 0]
    injected = [event["text"] for event in _faults_in(trace, restart, since)]
    return Incident(
        injected[-1] if injected else restart.cause,
        restart.failed_rank,
        _failed_at(trace, restart, since) - zero,
        restart.failed_t - zero,
        None if again is None else again - zero,
        max((each.last_step for each in before), default=restart.step),
        restart.step,
        restart.source,
        restart.lost_steps,
        len(together(trace.attempts, failed[-1])) if failed else 0,
        0 if again is None else len(ranks),
    )


def _failed_at(trace: Trace, restart: Restart, since: float) -> float:
    """Return when the first rank failed: at its injected fault or its error, else at its last event before the restart.

    The agent detects a failure only later, and a rank that ended without an error leaves no event of its failure.
    """
    rank = restart.failed_rank
    own = [
        each
        for each in trace.attempts.of_rank.get(-1 if rank is None else rank, ())
        if each.begun < restart.t
    ]
    known = [
        float(event["t"])
        for event in trace.faults
        if event["rank"] == rank and since < event["t"] < restart.t
    ]
    if own and own[-1].error is not None:
        known.append(float(own[-1].error["t"]))
    if not known and own:
        known.append(own[-1].last)
    return min([*known[-1:], restart.failed_t])


def _faults_in(trace: Trace, restart: Restart, since: float) -> list[Event]:
    """Return the injected faults that ended the failed rank."""
    return [
        event
        for event in trace.faults
        if event["kind"] == "kill" and event["rank"] == restart.failed_rank and since < event["t"] < restart.t
    ]


def _bars(
    attempt: Attempt,
    attempts: Attempts,
    incidents: Sequence[Incident],
    resizes: Sequence[Resized],
    end: float,
) -> Iterator[FaultBar]:
    """Yield the activities of a rank in one attempt, and until the restart after that attempt."""
    zero = attempts.begun or 0.0
    rank, begun = attempt.rank, attempt.begun - zero
    causes = [(each.detected_s, RESTART) for each in incidents] + [(each.at_s, RESIZE) for each in resizes]
    since, kind = max((cause for cause in causes if cause[0] <= begun), default=(begun, START))
    later = [each for each in incidents if each.detected_s > begun]
    left = min((each.at_s for each in resizes if each.at_s > begun), default=inf)
    failure = later[0] if later and later[0].detected_s < left else None
    stop = failure.failed_s if failure else min(left, end)
    first = stop if attempt.first is None else attempt.first - zero
    yield FaultBar(rank, kind, since, first)
    kept = max(attempt.resumed, min([attempt.last_step, *(each.resumed for each in later)]))
    kept_end = first if kept == attempt.resumed else (attempt.end_of(kept) or attempt.last) - zero
    if failure and kept in attempts.saved:  # saving the checkpoint is not lost either
        kept_end = max(kept_end, min(attempts.saved[kept] - zero, stop))
    if kept > attempt.resumed:
        yield FaultBar(rank, TRAINING, first, kept_end, attempt.resumed + 1, kept)
    if failure:
        seen = failure.detected_s
        stop = min(max(stop, attempt.last - zero), seen)
        yield _lost(attempt, kept, kept_end, stop)
        yield FaultBar(rank, DETECTION, stop, seen)
    elif kept < attempt.last_step:  # a failure after the resize went back to before it
        yield _lost(attempt, kept, kept_end, stop)


def _lost(attempt: Attempt, kept: int, start_s: float, end_s: float) -> FaultBar:
    is_known = attempt.last_step > kept
    return FaultBar(attempt.rank, LOST, start_s, end_s, (kept + 1) * is_known, attempt.last_step * is_known)


def _marks(trace: Trace, zero: float) -> Iterator[FaultMark]:
    """Yield the injected faults that did not cause a restart."""
    for event in trace.faults:
        if event["kind"] != "kill":
            yield FaultMark(event["rank"], event["t"] - zero, event["kind"], event["text"])


def _progress(
    attempts: Attempts, incidents: Sequence[Incident], resizes: Sequence[Resized], zero: float
) -> Iterator[Progress]:
    """Yield the steps over time between restarts and resizes, of the rank that took the most steps."""
    starts = sorted([*(each.detected_s for each in incidents), *(each.at_s for each in resizes)])
    for since, edge in pairwise([-inf, *starts, inf]):
        own = [each for each in attempts if since <= each.begun - zero < edge and each.first is not None]
        if not own:
            continue
        best = max(own, key=lambda each: len(each.ends))
        kept = min([best.last_step, *(each.resumed for each in incidents if each.detected_s > since)])
        every = max(1, len(best.ends) // MOST_POINTS)
        drawn = {*range(best.resumed, best.last_step, every), best.last_step, max(kept, best.resumed)}
        points = [(step, (best.end_of(step) or best.first or 0.0) - zero) for step in sorted(drawn)]
        yield Progress(tuple(round(time, 4) for _, time in points), tuple(step for step, _ in points), kept)


def faults_text(info: FaultsInfo) -> str:
    """Return sentences on failures and resizes in order of time, and on the fraction of useful time."""
    if not info.bars:
        return "No rank has started yet."
    changes = [(each.failed_s, incident_text(each)) for each in info.incidents[-_MOST_TOLD:]]
    changes += [(each.at_s, each.text) for each in info.resizes[-_MOST_TOLD:]]
    told = [text for _, text in sorted(changes)]
    if len(info.incidents) > _MOST_TOLD:
        told.insert(0, f"{len(info.incidents)} failures; the last {_MOST_TOLD} are described here.")
    if not info.incidents:
        told.insert(0, f"{info.label}: no rank has failed.")
    told += [f"Also: {mark.text}." for mark in info.marks[-_MOST_TOLD:]]
    return " ".join([*told, _goodput(info)]).strip()


def incident_text(incident: Incident) -> str:
    """Return a sentence on a failure: its cause, when it was noticed, where training continued, and what was lost."""
    cause = incident.cause[:1].upper() + incident.cause[1:]
    noticed = f"noticed after {duration_text(max(0.0, incident.detected_s - incident.failed_s))}"
    if incident.again_s is None:
        return f"{cause}, {noticed}; the ranks are restarting."
    where = f"the checkpoint of step {incident.resumed} {SOURCES.get(incident.source, '')}".strip()
    fewer = f" on {plural(incident.after, 'rank')}" if 0 < incident.after < incident.before else ""
    return (
        f"{cause}, {noticed}; training continued{fewer} after "
        f"{duration_text(incident.again_s - incident.failed_s)}, from "
        f"{where if incident.resumed else 'the beginning'}, and {plural(incident.num_lost, 'finished step')} had to be "
        "repeated."
    )


def _goodput(info: FaultsInfo) -> str:
    if info.goodput is None:
        return ""
    parts = [(LOST, "lost work"), (DETECTION, "detection"), (RESTART, "restarts"), (RESIZE, "resizes")]
    rest = [f"{name} {duration_text(info.seconds(kind))}" for kind, name in parts if info.seconds(kind) > 0]
    took = f"; {listed(rest)}" if rest else ""
    return (
        f"Goodput {info.goodput:.0%}: {duration_text(info.goodput * info.wall_s)} of the "
        f"{duration_text(info.wall_s)} since the first rank was ready went into steps that did not have to be "
        f"repeated{took}."
    )


class Resized(NamedTuple):
    """A change of the number of ranks that was not caused by a failure.

    Attributes:
        before: Number of ranks before the change.
        after: Number of ranks after the change.
        step: The last step before the change.
        at_s: Time at which that step ended.
        again_s: Time from which all new ranks trained; None until then.
    """

    before: int
    after: int
    step: int
    at_s: float
    again_s: float | None

    @property
    def text(self) -> str:
        """The change as a sentence."""
        what = f"Resized from {self.before} to {plural(self.after, 'rank')} after step {self.step}"
        if self.again_s is None:
            return f"{what}; the ranks are starting."
        return f"{what}; training continued after {duration_text(self.again_s - self.at_s)}."


def resized(attempts: Attempts, failures: Sequence[float]) -> list[Resized]:
    """Return the changes of the number of ranks between consecutive attempts of rank 0 that no failure separates.

    Args:
        attempts: The attempts of all ranks.
        failures: When the agent noticed each failure, in Unix seconds.
    """
    zero = attempts.begun or 0.0
    found = []
    for old, new in pairwise(attempts.of_rank.get(0, ())):
        if any(old.begun < failed <= new.begun for failed in failures):
            continue
        before, after = together(attempts, old), together(attempts, new)
        ended = max(each.ends[-1] if each.ends else each.last for each in before)
        again = began_to_train(after)
        found.append(
            Resized(
                len(before), len(after), old.last_step, min(ended, new.begun) - zero,
                None if again is None else again - zero,
            )
        )  # fmt: skip
    return found


def together(attempts: Attempts, one: Attempt) -> list[Attempt]:
    """Return the attempts that overlap in time with `one`, including `one` itself."""
    return [each for each in attempts if each.begun <= one.last and each.last >= one.begun]


def began_to_train(attempts: Sequence[Attempt]) -> float | None:
    """Return when the last of these attempts began its first step; None before, or if there are no attempts."""
    starts = [each.first for each in attempts]
    known = [start for start in starts if start is not None]
    return max(known) if known and len(known) == len(starts) else None
