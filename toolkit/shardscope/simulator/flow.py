"""A step of a pipeline: the passes of its schedule, with a message for every result that another rank needs.

The schedule's timeline is stretched to take exactly the predicted time of computation, bubble and messages. The
prediction computes the bubble by a closed form, and does not overlap messages with computation.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

from shardscope.analytic.communication.plan import Exchange, Flow, StepPlan
from shardscope.analytic.memory.in_flight import saved_in_flight
from shardscope.analytic.schedules import DURATIONS, Timed, Timeline
from shardscope.analytic.schedules.stage_passes import PHASE_OF
from shardscope.runlog.step_events import MESSAGE, StepEvent
from shardscope.simulator.parts import Cargo, StepTimes, busiest_bytes, timed

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
        messages = self.times.exposed if named is None else named.get(self.flow.sends, 0.0)
        self.sizes = [Counter[str](), Counter[str]()]
        for each in self.plan.exchanges:
            self.sizes[each.when.stage is None][each.collective] += busiest_bytes(each)
        inside = sum(self._part(name, is_after=False) for name in self.sizes[0])
        room = self.times.forward + self.times.backward + self.times.bubble + messages + inside
        self.timeline = self._timeline(messages)
        self.start = self.times.data
        self.scale = room / (self.timeline.end * self.flow.passes)
        self.end = self.start + room
        self.micro_batches = len({op.microbatch for op in self.flow.table.ops})

    def _part(self, collective: str, *, is_after: bool) -> float:
        """Return the seconds of a collective in passes, or after them, by its bytes."""
        if self.times.communication is None:
            return 0.0
        whole = sum(sizes[collective] for sizes in self.sizes) or 1
        return self.times.communication.get(collective, 0.0) * self.sizes[is_after][collective] / whole

    def _timeline(self, messages_s: float) -> Timeline:
        table, passes, ranks = self.flow.table, self.flow.passes, len(self.flow.table.ranks)
        backward = sum(op.op in "BI" for op in table.ops)
        forward_s = self.times.forward * ranks / (sum(op.op == "F" for op in table.ops) * passes)
        backward_s = self.times.backward * ranks / (backward * passes)
        unit = backward_s / DURATIONS["B"]
        durations = {"F": forward_s, "B": backward_s, "I": unit * DURATIONS["I"], "W": unit * DURATIONS["W"]}
        return table.timeline(durations, send=messages_s / (self._most_messages() * passes))

    def _most_messages(self) -> int:
        """Return the number of messages that the busiest rank sends in one pass; at least 1."""
        sent = [0] * len(self.flow.table.ranks)
        for op in self.flow.table.ops:
            if self.flow.crossing(op.op, op.stage) is not None:
                sent[self.flow.table.stage_ranks[op.stage]] += 1
        return max(1, *sent)

    def events(self) -> Iterator[StepEvent]:
        """Yield all events of the step; exchanges of gradients and norms follow the schedule, then the update."""
        ranks = range(self.ranks)
        yield from (StepEvent(r, "compute", "data", 0.0, self.start) for r in ranks if self.start)
        for number in range(self.flow.passes):
            for rank, row in enumerate(self.timeline.rows):
                for each in row:
                    yield from self._operation(rank, each, number)
        yield from self._in_passes()
        now = self.end
        after = [each for each in self.plan.exchanges if each.when.stage is None]
        late = [each for each in after if each.when.phase == "optimizer" and each.when.part == 1]
        for exchange in (each for each in after if each not in late):
            end = now + self._seconds(exchange)
            yield from timed(exchange, now, end, self.cargo, self.ranks)
            now = end
        now += self.times.codec
        until = now + self.times.optimizer
        yield from (StepEvent(r, "compute", "optimizer", now, until) for r in ranks if until > now)
        for exchange in late:
            end = until + self._seconds(exchange)
            yield from timed(exchange, until, end, self.cargo, self.ranks)
            until = end

    def _operation(self, rank: int, each: Timed, number: int) -> Iterator[StepEvent]:
        op, stage, part = each.op
        start, end = self.at(each.start, number), self.at(each.end, number)
        part += number * self.micro_batches
        staged = f" on stage {stage}" if self.flow.table.num_stages > len(self.flow.table.ranks) else ""
        message = self.flow.crossing(op, stage)
        for copy, own in enumerate(self.flow.ranks(rank)):
            yield StepEvent(own, "compute", _NAMES[op], start, end, item=f"micro-batch {part}{staged}")
            if message is not None:
                target, size = self.flow.ranks(message[0])[copy], message[1]
                what = self.cargo(self.flow.sends) if op == "F" else "gradients"
                arrival = self.at(each.end + self.timeline.send, number)
                item = f"{what} of micro-batch {part}"
                yield StepEvent(own, MESSAGE, self.flow.sends, end, arrival, target, size, item, _NAMES[op])

    def _in_passes(self) -> Iterator[StepEvent]:
        """Yield the collectives for which passes wait, each at its place in the pass."""
        places: dict[tuple[str, int, int], Timed] = {
            (PHASE_OF[each.op.op], each.op.stage, each.op.microbatch): each
            for row in self.timeline.rows
            for each in row
        }
        for exchange in self.plan.exchanges:
            phase, part, micro_batch, stage = exchange.when
            if stage is not None:
                number, place = divmod(micro_batch, self.micro_batches)
                each = places[phase, stage, place]
                end = self.at(each.end, number)
                start = min(self.at(each.start + part * (each.end - each.start), number), end)
                until = min(end, start + self._seconds(exchange))
                yield from timed(exchange, start, until, self.cargo, self.ranks)

    def at(self, time: float, number: int) -> float:
        """Convert a time in pass `number` of the schedule to a time in the step, in seconds."""
        return self.start + self.scale * (time + number * self.timeline.end)

    def _seconds(self, exchange: Exchange) -> float:
        is_after = exchange.when.stage is None
        whole = self.sizes[is_after][exchange.collective] or 1
        return self._part(exchange.collective, is_after=is_after) * busiest_bytes(exchange) / whole

    def activations(self) -> Iterator[tuple[int, float, float]]:
        """Yield changes of the activations that ranks hold: rank, time in seconds, bytes."""
        held = saved_in_flight(self.flow.table, self.flow.saved)
        for number in range(self.flow.passes):
            for rank, row in enumerate(held):
                last = row[-1][0]
                for own in self.flow.ranks(rank):
                    for index, size in row:
                        yield own, self.at(self.timeline.starts[index], number), size
                    yield own, self.at(self.timeline.ends[last], number), 0.0
