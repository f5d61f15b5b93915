"""A step of a pipeline: the passes of its schedule, with a message for every result that another rank needs.

The schedule's timeline is stretched to take exactly the predicted time of computation, bubble and messages. The
prediction computes the bubble by a closed form, and does not overlap messages with computation.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from shardscope.analytic.communication.plan import Exchange, Flow, StepPlan
from shardscope.analytic.schedules import DURATIONS, Timed, Timeline
from shardscope.runlog.step_events import MESSAGE, StepEvent
from shardscope.simulator.parts import Cargo, StepTimes, busiest_bytes, timed

COLLECTIVE = "send"
"""Name of the messages between stages in a strategy's traffic."""
_NAMES = {"F": "forward", "B": "backward", "I": "backward for inputs", "W": "backward for weights"}


@dataclass
class Piped:
    """Builds the events of a pipelined step; `timeline`, `scale` and `start` place the schedule in time."""

    plan: StepPlan
    times: StepTimes
    ranks: int
    cargo: Cargo

    def __post_init__(self) -> None:
        assert self.plan.flow is not None
        self.flow: Flow = self.plan.flow
        named = self.times.communication
        messages = self.times.exposed if named is None else named.get(COLLECTIVE, 0.0)
        room = self.times.forward + self.times.backward + self.times.bubble + messages
        self.timeline = self._timeline(messages)
        self.start = self.times.data
        self.scale = room / (self.timeline.end * self.flow.passes)
        self.end = self.start + room

    def _timeline(self, messages_s: float) -> Timeline:
        table, passes = self.flow.table, self.flow.passes
        backward = sum(op.op in "BI" for op in table.ops)
        forward_s = self.times.forward * self.ranks / (sum(op.op == "F" for op in table.ops) * passes)
        backward_s = self.times.backward * self.ranks / (backward * passes)
        unit = backward_s / DURATIONS["B"]
        durations = {"F": forward_s, "B": backward_s, "I": unit * DURATIONS["I"], "W": unit * DURATIONS["W"]}
        return table.timeline(durations, send=messages_s / (self._most_messages() * passes))

    def _most_messages(self) -> int:
        """Return the number of messages that the busiest rank sends in one pass; at least 1."""
        sent = [0] * self.ranks
        for op in self.flow.table.ops:
            if self.flow.crossing(op.op, op.stage) is not None:
                sent[self.flow.table.stage_ranks[op.stage]] += 1
        return max(1, *sent)

    def events(self) -> Iterator[StepEvent]:
        """Yield all events of the step; sums of tied gradients and norms follow the schedule, then the update."""
        ranks = range(self.ranks)
        yield from (StepEvent(r, "compute", "data", 0.0, self.start) for r in ranks if self.start)
        for number in range(self.flow.passes):
            for rank, row in enumerate(self.timeline.rows):
                for each in row:
                    yield from self._operation(rank, each, number)
        now = self.end
        for exchange in self.plan.exchanges:
            end = now + self._seconds(exchange)
            yield from timed(exchange, now, end, self.cargo, self.ranks)
            now = end
        now += self.times.codec
        until = now + self.times.optimizer
        yield from (StepEvent(r, "compute", "optimizer", now, until) for r in ranks if until > now)

    def _operation(self, rank: int, each: Timed, number: int) -> Iterator[StepEvent]:
        op, stage, part = each.op
        start, end = self.at(each.start, number), self.at(each.end, number)
        part += number * len({other.microbatch for other in self.flow.table.ops})
        staged = f" on stage {stage}" if self.flow.table.num_stages > self.ranks else ""
        yield StepEvent(rank, "compute", _NAMES[op], start, end, item=f"micro-batch {part}{staged}")
        message = self.flow.crossing(op, stage)
        if message is not None:
            target, size = message
            what = self.cargo(COLLECTIVE) if op == "F" else "gradients"
            arrival = self.at(each.end + self.timeline.send, number)
            item = f"{what} of micro-batch {part}"
            yield StepEvent(rank, MESSAGE, COLLECTIVE, end, arrival, target, size, item, _NAMES[op])

    def at(self, time: float, number: int) -> float:
        """Return the time in the step, in seconds, of a time in pass `number` of the schedule."""
        return self.start + self.scale * (time + number * self.timeline.end)

    def _seconds(self, exchange: Exchange) -> float:
        if self.times.communication is None:
            return 0.0
        same = [each for each in self.plan.exchanges if each.collective == exchange.collective]
        whole = sum(map(busiest_bytes, same)) or 1
        return self.times.communication.get(exchange.collective, 0.0) * busiest_bytes(exchange) / whole

    def activations(self) -> Iterator[tuple[int, float, float]]:
        """Yield changes of the activations that ranks hold: rank, time in seconds, bytes."""
        held = self.flow.table.held(stage_sizes=self.flow.stage_bytes)
        for number in range(self.flow.passes):
            for rank, row in enumerate(held):
                for index, size in row:
                    yield rank, self.at(self.timeline.starts[index], number), size
                last = row[-1][0]
                yield rank, self.at(self.timeline.ends[last], number), 0.0
