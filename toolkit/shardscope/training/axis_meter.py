"""A rank's meter as the group of one axis sees it: collectives get the axis in their names, and peers are job ranks.

So a run's counters, spans and logged messages tell the axes apart, while strategies and collectives stay unaware of
them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from shardscope.runlog.axes import on_axis
from shardscope.runlog.schema import OBSERVING
from shardscope.training.meter import Meter, Span, Traffic

COMMUNICATION = "communication"
"""The lane of spans whose names get the axis."""


class AxisMeter:
    """Adds what the group of one axis communicates to the rank's meter.

    Args:
        meter: The rank's meter.
        axis: The axis.
        ranks: The ranks of the job in the group, in the group's order.
    """

    def __init__(self, meter: Meter, axis: str, ranks: Sequence[int]) -> None:
        self._meter, self._axis, self._ranks = meter, axis, ranks

    def __getattr__(self, name: str) -> Any:  # steps, waits and passes belong to the rank
        return getattr(self._meter, name)

    def _named(self, name: str) -> str:
        """Return the name under which a collective is recorded; that of a measurement stays as it is."""
        return name if name in OBSERVING else on_axis(self._axis, name)

    @property
    def handed_over(self) -> float:
        """Time in Unix seconds at which the last collective was passed to the thread or backend that runs it."""
        return self._meter.handed_over

    @handed_over.setter
    def handed_over(self, at: float) -> None:
        if self._carries_gradients:
            self._meter.handed_over = at

    @property
    def _carries_gradients(self) -> bool:
        """Whether collectives of this axis in a backward pass exchange the gradients of the rank's parameters.

        Context ranks average gradients in the groups of the data axis. On the tensor, context and expert axes, a pass
        itself waits for the result of a collective, so holding it back would delay the pass. Gradients of tied weights
        in a pipeline and of experts are exchanged after the passes, which have then ended on an emulated processor too.
        """
        return self._axis == "data"

    def count(self, name: str, traffic: Traffic, *, step: int | None = None) -> None:
        """Add this rank's traffic in one call of a collective; see `Meter.count`."""
        counts = Traffic(
            traffic.payload_bytes, traffic.sent_bytes, traffic.received_bytes, traffic.messages, traffic.calls,
            {self._ranks[peer]: size for peer, size in traffic.sent_to.items()},
        )  # fmt: skip
        self._meter.count(self._named(name), counts, step=step)

    def log(
        self, name: str, way: str, peer: int, num_bytes: int, label: tuple[str, str] = ("", ""), *,
        step: int | None = None,
    ) -> None:  # fmt: skip
        """Log a message; see `Meter.log`."""
        self._meter.log(self._named(name), way, self._ranks[peer], num_bytes, label, step=step)

    def arrived(self, name: str, peer: int, num_bytes: int) -> None:
        """Record that a message has just arrived; see `Meter.arrived`."""
        self._meter.arrived(self._named(name), self._ranks[peer], num_bytes)

    def add_span(self, span: Span) -> None:
        """Record a span that has already ended."""
        is_named = span.lane == COMMUNICATION
        self._meter.add_span(replace(span, name=self._named(span.name)) if is_named else span)

    def hold_gradients(self) -> None:
        """Wait until a pass's gradients are ready on an emulated processor, if this axis exchanges them."""
        if self._carries_gradients:
            self._meter.hold_gradients()

    collective = Meter.collective
    span = Meter.span
