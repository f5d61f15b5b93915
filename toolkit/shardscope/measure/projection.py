"""Prediction of a finished run's step time on another link: compute times as measured, communication by formula.

For example, ``project(run, ss.Link(bandwidth="100 Mbit/s", latency="1 ms")).step_s`` is the step time on that link.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from shardscope.errors import SpecError
from shardscope.measure.probe import link_of_run
from shardscope.measure.replay import FIRST_SPAN, Rank, replay, step_of
from shardscope.measure.wire import Links, Wire, busiest
from shardscope.runlog.schema import Event
from shardscope.runlog.spans import finished_with_spans
from shardscope.runlog.steps import WARM_UP_STEPS
from shardscope.runtime import Run
from shardscope.spec import Link
from shardscope.training.meter import Span


@dataclass(frozen=True)
class Projection:
    """Predicted times of one step on a link, in seconds; medians over the steps whose spans the run recorded.

    Attributes:
        step_s: Step time of the slowest rank.
        compute_s: Measured compute time, the maximum over ranks.
        codec_s: Measured packing and unpacking time, the maximum over ranks.
        wire_s: Time of all communications, from the formulas for their patterns.
        software_s: Measured time of all communications in excess of these formulas: handing over, copying, adding.
        exposed_s: Part of the step that is not hidden behind computation: `step_s` minus `compute_s`.
    """

    step_s: float
    compute_s: float
    codec_s: float
    wire_s: float
    software_s: float
    exposed_s: float


def project(run: Run, link: Link | None) -> Projection:
    """Predict the step time that a run would have on another link.

    Args:
        run: A run with recorded spans for at least one step, on any link or on the machine's own.
        link: The link of each rank; None for the machine's own, which the run must then have used.

    Raises:
        SpecError: The ranks do not all take part in the same communications, the steps differ (local-sgd), or the run
            has no spans. Also if `link` is None but the run was on an emulated link.
    """
    _check_link(run, link)
    return Projector(run).on(link)


class Projector:
    """Predictor of one run's step time on many links; it reads the run only once. See `project` for requirements.

    Raises:
        SpecError: The ranks do not all take part in the same communications, the steps differ, or the run has no
            spans.
    """

    def __init__(self, run: Run) -> None:
        _check_run(run)
        self.run = run
        events = run.events()
        backend = next((event["backend"] for event in events if event["event"] == "start"), "")
        self._wire = Wire(run.resized_job, backend)  # without a start event, the check for steps below fails
        self._steps = list(_measured(events, run.job.world_size))
        if not self._steps:
            raise SpecError(
                f"run {run.id} has no step with recorded spans; record them with Record(spans_first=100)"
            )
        self._software_overheads = _software_overheads(self._steps, self._wire, link_of_run(run))

    def on(self, link: Link | None) -> Projection:
        """Predict the step time on this link; None means the machine's own link.

        Raises:
            SpecError: `link` is None, but the run was on an emulated link.
        """
        _check_link(self.run, link)
        found = [
            _step([rank.fresh() for rank in ranks], rows, self._wire, link, self._software_overheads)
            for ranks, rows in self._steps
        ]
        step, compute, codec, moving = (median(column) for column in zip(*found, strict=True))
        return Projection(
            step, compute, codec, moving, sum(self._software_overheads), exposed_s=step - compute
        )

    def step_on(self, bandwidth: ArrayLike, latency_s: ArrayLike) -> NDArray[np.float64]:
        """Return the step time on many links at once, in seconds; each value equals `step_s` of `on`.

        Args:
            bandwidth: Bandwidths in bytes per second, of any shape.
            latency_s: Latencies per message in seconds. Arguments follow NumPy broadcasting.
        """
        pairs = np.broadcast_arrays(np.asarray(bandwidth, float), np.asarray(latency_s, float))
        links = Links(*(np.ascontiguousarray(each) for each in pairs))
        found = [
            _step([rank.fresh() for rank in ranks], rows, self._wire, links, self._software_overheads)[0]
            for ranks, rows in self._steps
        ]
        stacked = np.stack([np.broadcast_to(each, links.bandwidth.shape) for each in found])
        return np.asarray(np.median(stacked, axis=0))


def _check_run(run: Run) -> None:
    strategy = run.job.strategy
    if not strategy.ranks_meet:
        raise SpecError(
            f"a run of strategy={strategy.label!r} cannot be projected to another link, because its ranks do not all "
            "take part in the same communications; run the job on that link instead"
        )
    if not run.job.compression.steps_are_alike:
        raise SpecError(
            f"a run with compression={run.job.compression.label!r} cannot be projected to another link, because "
            "its steps differ; run the job on that link instead"
        )


def _check_link(run: Run, link: Link | None) -> None:
    own = link_of_run(run)
    if link is None and own is not None:
        raise SpecError(
            f"run {run.id} used an emulated link ({own.label}) and cannot be projected to the machine's own "
            "link; give a link, or run the job without one"
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
    """Return a rank's spans by the step in which they started, because the next step's event contains some of them."""
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


def _software_overheads(
    steps: Sequence[tuple[list[Rank], list[Event]]], wire: Wire, link: Link | None
) -> list[float]:
    """Return the software overhead of each communication in a step, in seconds: the smallest excess over the formula.

    The minimum over all steps excludes the delay of communications that overlap computation on a busy machine. Such
    delays do not occur on a slower link, where ranks are idle during the transfer.
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
    ranks: list[Rank], rows: list[Event], wire: Wire, link: Link | Links | None, overheads: Sequence[float]
) -> tuple[Any, float, float, Any]:
    counted, rest = busiest(rows), iter(overheads)
    on_wire: list[Any] = [0.0]

    def takes(span: Span, _: float) -> Any:
        moving = wire.seconds(span.name, span.num_bytes, link, counted)
        on_wire.append(moving)
        return next(rest, 0.0) + moving

    seconds = replay(ranks, takes)
    compute = max(rank.compute_s for rank in ranks)
    codec = max(sum(span.seconds for span in rank.sent if span.lane == "codec") for rank in ranks)
    return seconds, compute, codec, sum(on_wire)
