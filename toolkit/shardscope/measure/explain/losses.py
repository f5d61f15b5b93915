"""Lost time in the steps of a run, as measured, by cause.

A loss is the fraction of a step that would be saved without its cause. Time spent computing is not lost, except for
the launch overhead of small operations, which is estimated from the prediction.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean
from typing import Literal, NamedTuple

from shardscope.analytic.terms import Term
from shardscope.measure.compare.measured import COMMUNICATION, IDLE
from shardscope.measure.pipeline_waits import PipelineWaits
from shardscope.runlog.stragglers import Straggler

Cause = Literal[
    "pipeline bubble",
    "uneven stages",
    "communication",
    "server",
    "straggler",
    "shared cores",
    "uneven steps",
    "small operations",
    "data",
    "idle",
    "none",
]
Parts = Mapping[tuple[str, str], float]
"""Seconds of a step by lane and part, as `parts_by_rank` returns them."""
DATA = "data"
_PASSES = ("forward", "backward")
_SERVES = 1.5
"""Ratio of the busiest rank's sent bytes to the mean of the other ranks above which it is a bottleneck."""
_PERSISTENT = 0.5
"""Average fraction of the waiting for the slowest rank that one rank must cause to count as a straggler."""


class Loss(NamedTuple):
    """A loss of time: its cause, its fraction of the step (0 to 1), and the rank that it is attributed to.

    Waiting in a pipeline is a fraction of the time from the first to the last pass; see `PipelineWaits`.
    """

    cause: Cause
    share: float
    rank: int


@dataclass(frozen=True)
class MeasuredStep:
    """A step of a run as measured: medians over its newest steps.

    Attributes:
        seconds: Time of the step on the slowest rank.
        parts: Time by part, by rank.
        computed: Time for which each rank computes, without reading data; unlike in `parts`, also while it
            communicates.
        waiting: Mean time over ranks spent waiting, in each step, for the rank that computes longest in that step.
        sent_bytes: Bytes that each rank sends in a step.
        roles: Role of each rank in the strategy; None if all ranks have the same role.
        shares_cores: Whether there are more ranks on this machine than cores.
        predicted: Prediction for the step; None if there is none.
        pipeline: Waiting between the passes of a pipeline; None for other strategies.
        cluster: Name of the emulated cluster that the run is on; empty on this machine itself.
        hidden: Time for which each rank communicates and also computes; it counts as communication. Empty if unknown.
        straggler: The rank that the alarm of the run's status names, unless it is slow in reading data; None for none.
    """

    seconds: float
    parts: Sequence[Parts]
    computed: Sequence[float]
    waiting: float
    sent_bytes: Sequence[float] = ()
    roles: Sequence[str | None] = ()
    shares_cores: bool = False
    predicted: Term | None = field(default=None, repr=False)
    pipeline: PipelineWaits | None = None
    cluster: str = ""
    hidden: Sequence[float] = ()
    straggler: Straggler | None = None

    @property
    def slowest(self) -> int:
        """The rank that computes longest: the one that the alarm names, if it names one."""
        if self.straggler is not None:
            return self.straggler.rank
        return max(range(len(self.computed)), key=lambda rank: self.computed[rank])

    def of(self, name: str) -> list[float]:
        """Return the time of a part, or of all communication, by rank, in seconds."""
        return [
            sum(value for (lane, part), value in parts.items() if name in (lane, part))
            for parts in self.parts
        ]

    def predicted_s(self, *names: str) -> float:
        """Return the predicted time of all terms with these names, in seconds; 0 without a prediction."""
        terms = () if self.predicted is None else self.predicted.walk()
        return sum(term.value for term in terms if term.name in names)


def computing_s(parts: Parts) -> float:
    """Return the seconds that a rank computes without communicating, given the parts of its step."""
    return sum(value for (lane, name), value in parts.items() if lane == "compute" and name != DATA)


def losses(step: MeasuredStep) -> list[Loss]:
    """Return all losses of a step, largest first."""
    waiting = [_waiting_for_ranks(step)] if step.pipeline is None else _in_pipeline(step, step.pipeline)
    found = [*waiting, _communication(step), _data(step), _small_operations(step), _idle(step)]
    return sorted(filter(None, found), key=lambda loss: -loss.share)


def _in_pipeline(step: MeasuredStep, waits: PipelineWaits) -> list[Loss]:
    """Return the parts of the waiting in a pipeline: due to the schedule, to unequal stages, and to other causes."""
    rest: Cause = "shared cores" if step.shares_cores else "uneven steps"
    bubble = min(waits.waiting, waits.bubble)
    uneven = min(waits.waiting, max(waits.bubble, waits.uneven))
    return [
        Loss("pipeline bubble", bubble, step.slowest),
        Loss("uneven stages", uneven - bubble, step.slowest),
        Loss(rest, waits.waiting - uneven, step.slowest),
    ]


def _waiting_for_ranks(step: MeasuredStep) -> Loss | None:
    """Return the time spent waiting for the slowest rank: a constant straggler, or a rank that varies by step.

    A rank that the alarm names is a straggler here too, unless the alarm says that no other rank waits for it.
    """
    named = step.straggler
    busy = [rank for rank, own in enumerate(step.computed) if own > 0.05 * max(step.computed)]
    if len(busy) < 2 or (named is not None and not named.wait_s):
        return None
    others = fmean(step.computed[rank] for rank in busy if rank != step.slowest)
    persistent = step.computed[step.slowest] - others
    waiting = max(step.waiting, persistent)
    turns: Cause = "shared cores" if step.shares_cores else "uneven steps"
    is_one = named is not None or persistent > _PERSISTENT * waiting
    return Loss("straggler" if is_one else turns, waiting / step.seconds, step.slowest)


def _communication(step: MeasuredStep) -> Loss | None:
    """Return the communication time of the rank that communicates least, since other ranks' times include waiting."""
    seconds = [each for each in step.of(COMMUNICATION) if each > 0]
    if not seconds:
        return None
    rank = _busiest(step)
    if step.pipeline is not None:  # other communication of a pipeline includes waiting
        share = min(step.predicted_s(COMMUNICATION), *seconds) / step.seconds
        return Loss("communication", share, rank or 0)
    if (
        rank is not None and step.roles[rank] is not None
    ):  # the others wait for the server, which itself need not wait
        others = [each for place, each in enumerate(step.of(COMMUNICATION)) if place != rank and each > 0]
        return Loss("server", min(others or seconds) / step.seconds, rank)
    return Loss("communication", min(seconds) / step.seconds, rank or 0)


def _busiest(step: MeasuredStep) -> int | None:
    """Return the rank that sends far more than the other ranks; None if there is no such rank."""
    sent = step.sent_bytes
    if len(sent) < 2:
        return None
    rank = max(range(len(sent)), key=lambda rank: sent[rank])
    others = fmean(each for place, each in enumerate(sent) if place != rank)
    return rank if sent[rank] > _SERVES * others else None


def _data(step: MeasuredStep) -> Loss:
    seconds = step.of(DATA)
    rank = max(range(len(seconds)), key=lambda rank: seconds[rank])
    return Loss("data", seconds[rank] / step.seconds, rank)


def _idle(step: MeasuredStep) -> Loss | None:
    """Return the time for which no rank recorded anything; None in a pipeline, where it counts as waiting."""
    if step.pipeline is not None:
        return None
    seconds = step.of(IDLE)
    rank = min(range(len(seconds)), key=lambda rank: seconds[rank])
    return Loss("idle", seconds[rank] / step.seconds, rank)


def _small_operations(step: MeasuredStep) -> Loss:
    """Return the measured time of the passes that is predicted to be spent on launching operations."""
    passes_s = step.predicted_s(*_PASSES)
    launching = step.predicted_s("launches") / passes_s if passes_s else 0.0
    seconds = [sum(values) for values in zip(*map(step.of, _PASSES), strict=True)]
    rank = max(range(len(seconds)), key=lambda rank: seconds[rank])
    return Loss("small operations", launching * seconds[rank] / step.seconds, rank)
