"""Measurements of a run, under the names of its prediction: traffic, memory by type, and the parts of a step.

Each moment of a step counts towards one part, so that the parts add up to the step. Where spans overlap, compression
takes precedence over the optimizer's update, the update over communication, and communication over the forward and
backward passes, because a pass may contain waits for parameters. A rank that only waits to receive is idle.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from statistics import median
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from shardscope.runlog.schema import MEMORY_KINDS, Event
from shardscope.runlog.spans import covered
from shardscope.runlog.steps import WARM_UP_STEPS, StepKinds, per_step, step_end, together_s, waited_once_s

Steps = Mapping[int, Sequence[Event]]
"""The events of each finished step, one per rank, by step number."""
Ints = npt.NDArray[np.int64]
COMMUNICATION, IDLE = "communication", "idle"
REST = "rest"
"""Term for the step time of the slowest rank minus the sum of the other terms, which are medians on one rank."""
ALL_WORKERS = "all workers"
PARTS = ("data", "forward", "backward", "optimizer", "codec", COMMUNICATION, IDLE)
"""Parts of a step, in the order of tables."""
_OTHER_NAMES = {"server_update": "optimizer"}
"""Part of a step by span name, where the two names differ: a server's update counts as ``optimizer``."""
_WAITS = frozenset({"recv"})
_PRECEDENCE = ("compute", "communication", "optimizer", "codec")
"""Lanes and parts in order of precedence where spans overlap, lowest first."""
_MOST_STEPS = 50
"""Maximum number of steps whose parts are computed: the newest ones with recorded spans."""


class CountedSteps(NamedTuple):
    """Traffic of one collective, summed over several steps, by rank; arrays of shape `(W,)`."""

    bytes: Ints
    messages: Ints


class StepTime(NamedTuple):
    """Time of a step on one rank by part, in seconds; medians over steps."""

    rank: int
    num_steps: int
    parts: Mapping[str, float]
    """Time by part, in seconds; the time of ``communication`` is the sum of `collectives`."""
    collectives: Mapping[str, float]


def warmed_up(steps: Mapping[int, object]) -> list[int]:
    """Return the numbers of the steps after the run's warm-up; all steps if the run is shorter than that."""
    numbers = sorted(steps)
    return numbers[WARM_UP_STEPS:] or numbers


def counted(steps: Iterable[Sequence[Event]], world_size: int) -> dict[str, CountedSteps]:
    """Return the traffic summed over these steps, by collective."""
    found: dict[str, CountedSteps] = {}
    for events in steps:
        for event in events:
            for name, row in event["traffic"].items():
                if row["sent_bytes"] or row.get("messages"):
                    kept = found.setdefault(name, CountedSteps(*np.zeros((2, world_size), dtype=np.int64)))
                    kept.bytes[event["rank"]] += row["sent_bytes"]
                    kept.messages[event["rank"]] += row.get("messages", 0)
    return found


def held_by_kind(events: Iterable[Event], world_size: int) -> tuple[int, dict[str, Ints]] | None:
    """Return the newest step in which all ranks measured memory, and its bytes by type and rank; None if none did.

    The type ``peak`` is the peak of all types together; it is missing if not all ranks recorded it.
    """
    rows: dict[int, dict[int, Event]] = {}
    for event in events:
        if event["event"] == "memory":
            rows.setdefault(event["step"], {})[event["rank"]] = event
    whole = [number for number, ranks in rows.items() if len(ranks) == world_size]
    if not whole:
        return None
    ranks = rows[max(whole)]
    kinds = [kind for kind in (*MEMORY_KINDS, "peak") if all(kind in event for event in ranks.values())]
    return max(whole), {kind: np.array([ranks[rank][kind] for rank in sorted(ranks)]) for kind in kinds}


def step_time(steps: Steps, period: int = 1) -> StepTime | None:
    """Return the parts of a step on the rank that computes longest; None until spans cover a whole period.

    Args:
        steps: The finished steps.
        period: Period of the compression's traffic, in steps.
    """
    shown = with_spans(steps, period)
    if not shown:
        return None
    computed = [
        median(map(_computed_s, own.values())) if own else 0.0
        for own in _with_gradients({number: steps[number] for number in shown})
    ]
    rank = computed.index(max(computed))
    found = parts_by_rank(steps, shown, period)[rank]
    if not found:
        return None
    collectives = {name: value for (lane, name), value in found.items() if lane == COMMUNICATION}
    parts = {name: value for (lane, name), value in found.items() if lane != COMMUNICATION}
    if collectives:
        parts[COMMUNICATION] = sum(collectives.values())
    return StepTime(rank, len(shown[WARM_UP_STEPS:] or shown), parts, collectives)


def with_spans(steps: Steps, period: int = 1) -> list[int]:
    """Return the numbers of the newest steps in which all ranks recorded spans, at most 50 or a whole period."""
    shown = [number for number, row in steps.items() if all("spans" in event for event in row)]
    return shown[-max(_MOST_STEPS, period + WARM_UP_STEPS) :]


def parts_by_rank(steps: Steps, shown: Sequence[int], period: int = 1) -> list[dict[tuple[str, str], float]]:
    """Return the time of each part of a step by rank, in seconds; medians over the steps `shown`.

    The keys are pairs of a lane and a part; ``(IDLE, IDLE)`` is the time for which the rank recorded nothing.
    """
    return [
        _medians({number: seconds_by_part(event) for number, event in by_number.items()}, period)
        for by_number in _with_gradients({number: steps[number] for number in shown})
    ]


def _with_gradients(steps: Steps) -> list[dict[int, Event]]:
    """Return the events of each rank by step, without steps for which all gradients came from other ranks."""
    ranks = range(len(next(iter(steps.values()), ())))
    return [
        {number: row[rank] for number, row in steps.items() if row[rank].get("gradients", 1)}
        for rank in ranks
    ]


def all_workers_s(steps: Steps, period: int = 1) -> float | None:
    """Return the time in which asynchronous workers together compute as many gradients as a step has, in seconds.

    This is the mean over the steps after the warm-up, as in `Summary`; None until a period has ended.

    Args:
        steps: The finished steps.
        period: Period of the compression's traffic, in steps.
    """
    return per_step(list(steps), [*map(together_s, steps.values())], StepKinds(period), average="mean")


def slowest_rank_s(steps: Steps, period: int = 1) -> float | None:
    """Return the step time of the slowest rank in seconds; None until a period has ended.

    For ranks that share the gradients of steps, this is the time of one gradient.

    The result is the median over the steps after the warm-up, as in `Summary`. If the first steps of a run are
    uncompressed, `Summary` has the weighted mean of two medians, over uncompressed and over compressed steps.

    Args:
        steps: The finished steps, which are all compressed or all uncompressed.
        period: Period of the compression's traffic, in steps.
    """
    if any("gradients" in event for row in steps.values() for event in row):
        medians = [
            per_step(
                list(own),
                [event["step_time_s"] / event["gradients"] for event in own.values()],
                average="median",
            )
            for own in _with_gradients({n: [e for e in row if "gradients" in e] for n, row in steps.items()})
        ]
        return max((each for each in medians if each is not None), default=None)
    ends = {number: step_end(row) for number, row in steps.items()}
    seconds = {number: end.step_time_s for number, end in ends.items()}
    if period > 1:
        before = {number + 1: end.t for number, end in ends.items()}
        seconds = {
            number: waited_once_s(seconds[number], end.t, before.get(number)) for number, end in ends.items()
        }
    return per_step(list(steps), list(seconds.values()), StepKinds(period), average="median")


def _computed_s(event: Event) -> float:
    """Return the time for which a rank computes, also while its messages travel, but does not wait within passes."""
    spans = [(start, end) for lane, _, start, end, _ in event["spans"] if lane != COMMUNICATION]
    waits: float = sum(event.get("waited", {}).values())
    return (covered(spans) - waits) / (event.get("gradients") or 1)


def _medians(
    by_step: Mapping[int, Mapping[tuple[str, str], float]], period: int
) -> dict[tuple[str, str], float]:
    names = dict.fromkeys(name for parts in by_step.values() for name in parts)
    found = {}
    for name in names:
        values = [parts.get(name, 0.0) for parts in by_step.values()]
        middle = per_step(list(by_step), values, StepKinds(period), average="median")
        if middle:
            found[name] = middle
    return found


def seconds_by_part(event: Event) -> dict[tuple[str, str], float]:
    """Return the time of one rank's step by lane and part, in seconds; each moment is counted once.

    If ranks share the gradients of steps, this is the time of one gradient; the event must have at least one.
    """
    spans = [(*_part(lane, name), start, end) for lane, name, start, end, _ in event["spans"]]
    spans = [span for span in spans if span[1] not in _WAITS]
    names = list(dict.fromkeys((lane, name) for lane, name, *_ in spans))
    edges = np.unique([edge for *_, start, end in spans for edge in (start, end)])
    owner = np.full(max(0, len(edges) - 1), len(names))
    for lane, name, start, end in sorted(spans, key=_precedence):
        first, last = np.searchsorted(edges, (start, end))
        owner[first:last] = names.index((lane, name))
    seconds = np.bincount(owner, weights=np.diff(edges), minlength=len(names) + 1)[: len(names)]
    found = dict(zip(names, seconds.tolist(), strict=True))
    found[IDLE, IDLE] = max(0.0, event["step_time_s"] - sum(found.values()))
    return {part: each / (event.get("gradients") or 1) for part, each in found.items()}


def _part(lane: str, name: str) -> tuple[str, str]:
    return (lane, "codec") if lane == "codec" else (lane, _OTHER_NAMES.get(name, name))


def _precedence(span: tuple[str, str, float, float]) -> tuple[int, float]:
    """Return a span's sort key: spans with larger keys overwrite others; at equal precedence, the earlier span wins."""
    lane, name, start, _ = span
    kind = name if name in _PRECEDENCE else lane
    return (_PRECEDENCE.index(kind) if kind in _PRECEDENCE else 0), -start
