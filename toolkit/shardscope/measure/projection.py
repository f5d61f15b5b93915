"""Projection of a finished run to another link: computing and packing as measured, communication by formula.

project(run, ss.Link(bandwidth="100 Mbit/s", latency="1 ms")).step_s
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from shardscope.errors import SpecError
from shardscope.measure.replay import FIRST_SPAN, Rank, replay, step_of
from shardscope.measure.wire import Links, Wire, busiest
from shardscope.runlog.averages import WARM_UP_STEPS
from shardscope.runlog.spans import finished_with_spans
from shardscope.runlog.traffic import Event
from shardscope.runtime import Run
from shardscope.spec import Link
from shardscope.training.meter import Span


@dataclass(frozen=True)
class Projection:
    """Times of one step on a link, in seconds; medians over those of the run's steps whose spans were recorded.

    Attributes:
        step_s: Step time of the slowest rank.
        compute_s: Compute time of the rank that computes longest, as measured.
        codec_s: Packing and unpacking time of the rank with the most of it, as measured.
        wire_s: Time of all communications, from the formulas for their patterns.
        software_s: Measured time of the communications beyond the formulas: handing over, copying, adding.
        exposed_s: Time of the step that is not hidden behind computing.
    """

    step_s: float
    compute_s: float
    codec_s: float
    wire_s: float
    software_s: float
    exposed_s: float


def project(run: Run, link: Link | None) -> Projection:
    """Project the step time of a run to another link.

    Args:
        run: A run with recorded spans for at least one step, on any link or on the machine's own.
        link: The link of each rank; None for the machine's own, which the run must then have used.

    Raises:
        SpecError: Ranks of this strategy wait for each other's computing, its steps are not equal (local-sgd), or the
            run has no spans. Also if `link` is None but the run was on an emulated link.
    """
    _refuse_link(run, link)
    return Projector(run).on(link)


class Projector:
    """One run, read once, for projections to many links; see `project` for its requirements.

    Raises:
        SpecError: Ranks of this strategy wait for each other's computing, its steps are not equal, or the run has no
            spans.
    """

    def __init__(self, run: Run) -> None:
        _refuse(run)
        self.run = run
        events = run.events()
        backend = next((event["backend"] for event in events if event["event"] == "start"), "")
        self._wire = Wire(run.job, backend)  # without a start event there are no steps either
        self._steps = list(_measured(events, run.job.world_size))
        if not self._steps:
            raise SpecError(
                f"run {run.id} has no step with its spans; record them with Record(spans_first=100)"
            )
        self._handling = _handling(self._steps, self._wire, run.job.link)

    def on(self, link: Link | None) -> Projection:
        """Project one step to this link.

        Raises:
            SpecError: `link` is None, but the run was on an emulated link.
        """
        _refuse_link(self.run, link)
        found = [
            _step([rank.fresh() for rank in ranks], rows, self._wire, link, self._handling)
            for ranks, rows in self._steps
        ]
        step, compute, codec, moving = (median(column) for column in zip(*found, strict=True))
        return Projection(step, compute, codec, moving, sum(self._handling), exposed_s=step - compute)

    def step_on(self, bandwidth: ArrayLike, latency_s: ArrayLike) -> NDArray[np.float64]:
        """Return the step time on many links at once, in seconds; each value equals `step_s` of `on`.

        Args:
            bandwidth: Bandwidths in bytes per second, of any shape.
            latency_s: Latencies per message in seconds. Arguments follow NumPy broadcasting.
        """
        pairs = np.broadcast_arrays(np.asarray(bandwidth, float), np.asarray(latency_s, float))
        links = Links(*(np.ascontiguousarray(each) for each in pairs))
        found = [
            _step([rank.fresh() for rank in ranks], rows, self._wire, links, self._handling)[0]
            for ranks, rows in self._steps
        ]
        stacked = np.stack([np.broadcast_to(each, links.bandwidth.shape) for each in found])
        return np.asarray(np.median(stacked, axis=0))


def _refuse(run: Run) -> None:
    strategy = run.job.strategy
    if not strategy.ranks_meet:
        raise SpecError(
            f"a run of strategy={strategy.label!r} cannot be projected step by step, as its ranks do not all take part "
            "in the same communications; run it on the link instead"
        )
    if not run.job.compression.steps_are_alike:
        raise SpecError(
            f"a run with compression={run.job.compression.label!r} cannot be projected step by step, as its steps "
            "differ; run it on the link instead"
        )


def _refuse_link(run: Run, link: Link | None) -> None:
    if link is None and run.job.link is not None:
        raise SpecError(
            f"run {run.id} was on a link ({run.job.link.label}) and cannot be projected to the machine's own link; "
            "give a link, or run the job without one"
        )


def _measured(events: Iterable[Event], world_size: int) -> Iterator[tuple[list[Rank], list[Event]]]:
    """Yield each step for which every rank recorded spans; warm-up steps only if there are no other steps."""
    rows = finished_with_spans(events, world_size)
    own = {rank: _by_step([e for row in rows for e in row if e["rank"] == rank]) for rank in _ranks(rows)}
    for row in rows[WARM_UP_STEPS:] or rows:
        spans = [own[event["rank"]][event["step"]] for event in row]
        zero = min(span.start for mine in spans for span in mine)
        ranks = [
            step_of([span.since(zero) for span in mine], event["step_time_s"])
            for mine, event in zip(spans, row, strict=True)
        ]
        if (
            len({len(rank.communications) for rank in ranks} - {0}) <= 1
        ):  # spans of the last step may be missing on some ranks
            yield ranks, row


def _ranks(rows: list[list[Event]]) -> set[int]:
    return {event["rank"] for row in rows for event in row}


def _by_step(events: list[Event]) -> dict[int, list[Span]]:
    """Return a rank's spans by the step in which they started; one that ends with it is recorded with the next."""
    spans = sorted(
        (Span(*row) for event in events for row in event["spans"]), key=lambda span: (span.start, span.end)
    )
    starts = [span.start for span in spans if span.name == FIRST_SPAN]
    assert len(starts) == len(events)
    limits = [*starts[1:], float("inf")]
    return {
        event["step"]: [span for span in spans if start <= span.start < limit]
        for event, start, limit in zip(events, starts, limits, strict=True)
    }


def _handling(steps: Sequence[tuple[list[Rank], list[Event]]], wire: Wire, link: Link | None) -> list[float]:
    """Return the software overhead of each communication of a step, in seconds: its smallest excess over the formula.

    Taking the minimum over all steps excludes the delay of communications that overlap computing on a busy machine.
    That delay does not occur on a slower link, where ranks are idle while messages travel.
    """
    found = []
    for ranks, rows in steps:
        counted = busiest(rows)
        beyond: list[float] = []

        def takes(span: Span, took: float, counted: Any = counted, beyond: list[float] = beyond) -> float:
            beyond.append(max(0.0, took - wire.seconds(span.name, span.num_bytes, link, counted)))
            return took

        replay([rank.fresh() for rank in ranks], takes)
        found.append(beyond)
    return [min(each) for each in zip(*found, strict=False)]


def _step(
    ranks: list[Rank], rows: list[Event], wire: Wire, link: Link | Links | None, handling: Sequence[float]
) -> tuple[Any, float, float, Any]:
    counted, rest = busiest(rows), iter(handling)
    on_wire: list[Any] = [0.0]

    def takes(span: Span, _: float) -> Any:
        moving = wire.seconds(span.name, span.num_bytes, link, counted)
        on_wire.append(moving)
        return next(rest, 0.0) + moving

    seconds = replay(ranks, takes)
    compute = max(rank.compute_s for rank in ranks)
    codec = max(sum(span.seconds for span in rank.sent if span.lane == "codec") for rank in ranks)
    return seconds, compute, codec, sum(on_wire)
