"""A step in which all ranks compute at the same time, as with replicas, parameter servers and ZeRO.

The passes run one after another. If the prediction assumes no overlap, a pass pauses while an exchange runs, so the
step takes exactly the sum of its parts. For layouts, the prediction hides exchanges behind computation and knows only
the time that remains; they are then spread evenly over the passes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from shardscope.analytic.communication.plan import Exchange, StepPlan
from shardscope.runlog.step_events import StepEvent
from shardscope.simulator.exchanges import Cargo, timed
from shardscope.simulator.parts import StepTimes


@dataclass
class TimedPass:
    """One pass of a step, and the times at which it runs.

    Attributes:
        phase: ``data``, ``forward``, ``backward`` or ``optimizer``.
        micro_batch: Number of the micro-batch, from 0.
        seconds: Time that the pass computes.
        start: Start of the pass, in seconds.
        end: End of the pass and of its exchanges, in seconds.
        gathers: End time and bytes of each gathering of parameters.
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
        """Return when a share of the pass has been computed."""
        left = share * sum(end - start for start, end in self.computing)
        for start, end in self.computing:
            if left <= end - start:
                return start + left
            left -= end - start
        return self.computing[-1][1] if self.computing else self.end


class Lockstep:
    """Builds the events of a step in which every pass runs on all ranks at the same time."""

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


def busiest_bytes(exchange: Exchange) -> int:
    """Return the bytes that the busiest rank sends in an exchange."""
    if exchange.whole is not None:
        return int(exchange.whole.max())
    sent: dict[int, int] = {}
    for move in (move for each in exchange.rounds for move in each.moves):
        sent[move.source] = sent.get(move.source, 0) + move.num_bytes
    return max(sent.values(), default=0)
