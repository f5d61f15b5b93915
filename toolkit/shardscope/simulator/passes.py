"""The passes of a pipeline's schedule in the graph of a step, with the collectives for which they wait."""

from __future__ import annotations

from typing import TYPE_CHECKING

from shardscope.analytic.communication.plan import Exchange, Flow, StepPlan
from shardscope.analytic.schedules import ScheduledOp
from shardscope.analytic.schedules.stage_passes import PHASE_OF
from shardscope.analytic.schedules.transfers import add_schedule, micro_batch_label
from shardscope.prediction.pipeline_time import pass_seconds

if TYPE_CHECKING:
    from shardscope.simulator.of_job import JobStepGraph


class Passes:
    """Adds the passes of all copies of a pipeline to the graph of a step; an operation of the schedule is a list of
    graph operations, one for each copy.

    Args:
        step: The graph of the step.
        plan: The messages of the step.
        flow: The passes, `plan.flow`.
    """

    def __init__(self, step: JobStepGraph, plan: StepPlan, flow: Flow) -> None:
        self.step, self.flow, times = step, flow, step.times
        along = step.prediction.job.strategy.pipeline_step(step.prediction.step)
        self.seconds = pass_seconds(along, flow, times.forward, times.backward)
        self.starts = [step.graph.add(rank) for rank in range(step.ranks)]
        self.waiting = set(range(step.ranks))
        self.on_its_way: dict[tuple[int, int], int] = {}  # messages between two ranks keep their order
        self.ops: list[list[int]] = []
        self.number = 0
        self.micro_batches = sum(op.op == "F" and op.stage == 0 for op in flow.table.ops)
        self.inside: dict[tuple[str, int, int], list[Exchange]] = {}
        for each in plan.exchanges:
            if each.when.stage is not None:
                key = each.when.phase, each.when.stage, each.when.micro_batch
                self.inside.setdefault(key, []).append(each)

    def add(self) -> list[int]:
        """Add all passes, and return each rank's last operation."""
        flow = self.flow
        now = [
            self._kept([self.starts[rank] for rank in flow.ranks(at)]) for at in range(len(flow.table.ranks))
        ]
        for self.number in range(flow.passes):
            now = add_schedule(flow.table, now, self._pass, self._message).ranks
        return [op for each in now for op in self.ops[each]]

    def _kept(self, ops: list[int]) -> int:
        self.ops.append(ops)
        return len(self.ops) - 1

    def _after(self, waits: list[int]) -> list[list[int]]:
        """Return, for each copy, the operations that are its part of operations of the schedule."""
        return [list(each) for each in zip(*(self.ops[wait] for wait in waits), strict=True)]

    def _pass(self, op: ScheduledOp, waits: list[int], _is_last: bool) -> int:
        """Add a pass; a rank reads its data when the input of its first pass arrives, since it may be busy with the
        previous step.
        """
        table, graph = self.flow.table, self.step.graph
        ranks = self.flow.ranks(table.stage_ranks[op.stage])
        kind = "forward" if op.op == "F" else "backward"
        after = self._after(waits) if waits else [[] for _ in ranks]
        for copy, rank in enumerate(ranks):
            if rank in self.waiting:
                self.waiting.remove(rank)
                after[copy] = [self.step.compute(rank, "data", self.step.times.data, after[copy])]
        label, duration, done = micro_batch_label(op, table), self.seconds[op.op][op.stage], 0.0

        def until(part: float) -> list[int]:
            seconds = (part - done) * duration
            return [
                graph.add(rank, kind, seconds, after=after[copy], label=label)
                for copy, rank in enumerate(ranks)
            ]

        micro_batch = self.number * self.micro_batches + op.microbatch
        inside = self.inside.get((PHASE_OF[op.op], op.stage, micro_batch), [])
        for each in sorted(inside, key=lambda exchange: exchange.when.part):
            entry = self.starts.copy()
            entry[ranks.start : ranks.stop] = until(max(done, each.when.part))
            ends = self.step.exchange(each, entry)
            after = [[ends[rank]] for rank in ranks]
            done = max(done, each.when.part)
        return self._kept(until(1.0))

    def _message(self, op: ScheduledOp, waits: list[int], target: int) -> int:
        """Add the message of a pass to the next or the previous stage."""
        flow, step = self.flow, self.step
        message = flow.crossing(op.op, op.stage)
        assert message is not None
        sources, targets = flow.ranks(flow.table.stage_ranks[op.stage]), flow.ranks(target)
        label = step.cargo(flow.sends) if op.op == "F" else "gradients"
        found = []
        for source, to, after in zip(sources, targets, self._after(waits), strict=True):
            wire, before = step.wire(flow.sends, source, to), self.on_its_way.get((source, to), -1)
            self.on_its_way[source, to] = step.graph.add(
                source, flow.sends, wire.latency + wire.message_s, size=float(message[1]), links=wire.links,
                after=[*after, before], serial=False, label=label, peer=to,
            )  # fmt: skip
            found.append(self.on_its_way[source, to])
        return self._kept(found)
