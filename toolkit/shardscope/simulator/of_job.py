"""One training step of a job as a graph: passes of each rank, and the messages of its strategy, one by one.

Computing times, the rates of links and the time of a message are those of the prediction. Messages of a strategy come
from its `plan`; without a plan, or with too many messages, each rank's bytes in a collective are one message.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial

import numpy as np

from shardscope.analytic.communication.plan import Exchange, Flow, StepPlan, When, message_slices
from shardscope.errors import SpecError
from shardscope.prediction.job import JobPrediction
from shardscope.prediction.job_time import loads_of, traffic_of_copies
from shardscope.prediction.loads import awaited, rank_loads, rank_updates
from shardscope.prediction.network_time import StepLoads, step_plan
from shardscope.prediction.step.machine import Machine
from shardscope.simulator.graph import Graph, Ints
from shardscope.simulator.parts import StepTimes
from shardscope.simulator.passes import Passes
from shardscope.simulator.rounds import MessagePath, Order, add_rounds, one_by_one_wires
from shardscope.spec.job_layout import IN_LAYOUTS

_UNLIMITED = 1e15
"""Bytes per second of a link that does not limit messages."""


@dataclass
class JobStepGraph:
    """Builds the graph of one step of a predicted job, with one lane for each rank.

    Attributes:
        prediction: The job's prediction.
        overlap: Whether ranks compute while they exchange gradients and gather parameters.
        graph: Result: the graph.
        merged: Result: sentences on what was merged.
    """

    prediction: JobPrediction
    overlap: bool = False
    merged: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        found, job = self.prediction, self.prediction.job
        if found.time is None:
            raise SpecError(f"this job has no step time: {found.note}")
        if found.traffic is None:
            raise SpecError(
                f"strategy={job.strategy.name!r} does not say what its ranks send; define its `traffic`, or use "
                "another strategy, such as 'ring'"
            )
        self.times, self.ranks = StepTimes.of(found.time), job.world_size
        self.graph = Graph([f"rank {rank}" for rank in range(self.ranks)])
        self.rates = found.rates
        self._times: dict[tuple[str, int], float] = {}
        network = self.rates.network
        self._loads = None if network is None else StepLoads.of(found.step, found.traffic, network)
        self._add_links()
        loads = rank_loads(found.step)
        self.work = [each.computing / awaited(found.step, loads).computing for each in loads]
        updates = rank_updates(found.step)
        self.updates = [self.times.optimizer * each / max(updates) for each in updates]
        self.cargo = job.strategy.cargo
        # If latencies or levels count, the messages of a rank to several other ranks travel at the same time.
        has_levels = loads_of(found.step, found.traffic, self.rates) is not None
        self._order: Order = "shared" if has_levels else "in turn"
        plan = step_plan(found.step, found.traffic)
        if plan is None:
            self.merged.append("All messages of a rank in a collective are one message.")
            plan = _without_rounds(found)
        self.plan = plan
        self.slices = message_slices(plan, found.traffic)
        self.calls = _calls(plan, self.ranks)
        now = self._piped(plan, plan.flow) if plan.flow else self._passes(plan)
        for rank in range(self.ranks):
            self.compute(rank, "fixed cost", self.times.rest, [now[rank]])

    def _add_links(self) -> None:
        found, network = self.prediction, self.rates.network
        if network is not None:
            self.graph.width = network.width
            for name, capacity in zip(network.names, network.capacity.tolist(), strict=True):
                self.graph.link(name, min(capacity, _UNLIMITED))
            return
        ranks, link = range(self.ranks), min(self.rates.link, _UNLIMITED)
        self.out = [self.graph.link(f"rank {rank}, out", link) for rank in ranks]
        self.into = [self.graph.link(f"rank {rank}, in", link) for rank in ranks]
        self.nodes: dict[int, tuple[int, int]] = {}
        cluster = found.cluster
        if cluster is None or found.calibration is None or cluster.nodes == 1:
            return
        machine = Machine.of(cluster, found.calibration, IN_LAYOUTS.get(found.job.precision, "fp32"))
        inside, _ = machine.link(cluster.per_node, 1)
        for rank in ranks:
            self.graph.capacity[self.out[rank]] = self.graph.capacity[self.into[rank]] = float(inside)
        whole = cluster.per_node * cluster.inter.bandwidth * found.calibration.inter_efficiency
        for node in range(cluster.nodes):
            self.nodes[node] = (
                self.graph.link(f"node {node}, out", whole),
                self.graph.link(f"node {node}, in", whole),
            )

    def wire(self, collective: str, source: int, target: int, *, is_attached: bool = False) -> MessagePath:
        """Return the path of a message of a collective between two ranks."""
        cluster = self.prediction.cluster
        fixed = (0.0 if is_attached else self.rates.latency_s, self.message_s(collective, source))
        if self.rates.network is not None:
            ways = self.rates.network.ways(np.array([source]), np.array([target]))[0]
            return MessagePath(fixed[0], tuple(ways[ways >= 0].tolist()), fixed[1])
        if self.nodes and cluster is not None and source // cluster.per_node != target // cluster.per_node:
            out, into = self.nodes[source // cluster.per_node][0], self.nodes[target // cluster.per_node][1]
            is_narrow = self.graph.capacity[self.out[source]] < self.graph.capacity[out]
            return MessagePath(fixed[0], (self.out[source] if is_narrow else out, into), fixed[1])
        return MessagePath(fixed[0], (self.out[source], self.into[target]), fixed[1])

    def message_s(self, collective: str, rank: int) -> float:
        """Return the seconds of a message that a rank sends in a collective, not counting its latency and the transfer
        of its bytes.
        """
        flow, place = self.plan.flow, -1
        if flow is not None and flow.copies > 1 and collective != flow.sends:
            place = rank // flow.copies
        if (collective, place) not in self._times:
            traffic, loads = self.prediction.traffic or {}, self._loads
            if flow is not None and place >= 0:
                calls = tuple(each for each in self.plan.exchanges if each.collective == collective)
                traffic, loads = traffic_of_copies(flow, traffic, self.rates, StepPlan(calls), place)
            sent = traffic[collective]
            carried_s = None if loads is None else loads.carried_s(collective, sent)
            self._times[collective, place] = self.rates.per_message_s(collective, sent, carried_s)
        return self._times[collective, place]

    def _way_out(self, each: Exchange, rank: int) -> tuple[int, ...]:
        """Return the links for messages with unknown receivers; if links are unequal, those to the assumed receiver."""
        if self.rates.network is None:
            return (self.out[rank],)
        target = (rank + 1) % self.ranks if each.towards is None else int(each.towards[rank])
        return self.wire(each.collective, rank, target).links

    def emptied(self) -> Graph:
        """Return a copy of the graph with the same lanes and links, but without operations."""
        graph = self.graph
        return Graph(graph.lanes, list(graph.link_names), list(graph.capacity), width=graph.width)

    def compute(self, rank: int, kind: str, seconds: float, after: Sequence[int], *, label: str = "") -> int:
        """Add a rank's computation, and return it; if it takes no time, return what it follows."""
        if seconds <= 0:
            return after[0] if len(after) == 1 else self.graph.add(rank, after=after)
        return self.graph.add(rank, kind, seconds, after=after, label=label)

    # Steps in which all ranks compute at the same time

    def _passes(self, plan: StepPlan) -> list[int]:
        now = [self.compute(rank, "data", self.times.data, []) for rank in range(self.ranks)]
        micro_batches = self.prediction.step.micro_batches
        self.open: list[list[int]] = [[] for _ in range(self.ranks)]
        for k in range(micro_batches):
            for phase, seconds in (("forward", self.times.forward), ("backward", self.times.backward)):
                mine = [e for e in plan.exchanges if e.when.phase == phase and e.when.micro_batch == k]
                label = f"micro-batch {k}" if micro_batches > 1 else ""
                now = self._pass(phase, seconds / micro_batches, mine, now, label)
        now = [self.graph.add(rank, after=[op, *self.open[rank]]) for rank, op in enumerate(now)]
        now = [self.compute(rank, "codec", self.times.codec, [op]) for rank, op in enumerate(now)]
        updating = set(range(self.ranks) if plan.updating is None else plan.updating)
        exchanges = [e for e in plan.exchanges if e.when.phase == "optimizer"]
        early = [e for e in exchanges if e.when.part < 1]
        for each in early:
            now = self.exchange(each, now)
        now = [
            self.compute(rank, "optimizer", self.updates[rank] * (rank in updating), [op])
            for rank, op in enumerate(now)
        ]
        for each in exchanges[len(early) :]:
            now = self.exchange(each, now)
        return now

    def _pass(
        self, phase: str, seconds: float, exchanges: Sequence[Exchange], now: list[int], label: str
    ) -> list[int]:
        """Add a pass and the exchanges that start during it; without overlap, the pass pauses during each exchange."""
        done, previous = 0.0, now
        for each in sorted(exchanges, key=lambda exchange: exchange.when.part):
            part = max(done, each.when.part)
            at = [
                self.compute(rank, phase, (part - done) * seconds * self.work[rank], [op], label=label)
                for rank, op in enumerate(now)
            ]
            if each.blocks or not self.overlap:
                now = self.exchange(each, at)
            elif each.gathers:  # parameters are prefetched one unit ahead, and awaited before use
                ends = self.exchange(each, self._after_open(previous), serial=False)
                now = [
                    self.graph.add(rank, after=pair) for rank, pair in enumerate(zip(at, ends, strict=True))
                ]
                self.open = [[end] for end in ends]
                previous = at
            else:
                ends = self.exchange(each, self._after_open(at), serial=False)
                self.open, now = [[end] for end in ends], at
            done = part
        return [
            self.compute(rank, phase, (1.0 - done) * seconds * self.work[rank], [op], label=label)
            for rank, op in enumerate(now)
        ]

    def _after_open(self, now: Sequence[int]) -> list[int]:
        """Return, by rank, an operation that ends when the collectives in progress have ended, because only one runs at
        a time.
        """
        return [self.graph.add(rank, after=[op, *self.open[rank]]) for rank, op in enumerate(now)]

    def exchange(self, each: Exchange, entry: Sequence[int], *, serial: bool = True) -> list[int]:
        """Add a collective, and return the operation with which it ends on each rank."""
        cargo = self.cargo(each.collective)
        if each.whole is None:
            wire = partial(self.wire, each.collective, is_attached=each.is_attached)
            return add_rounds(
                self.graph, each.rounds, entry,
                one_by_one_wires(wire, self.graph.width), each.collective,
                slices=each.slices or self.slices.get(each.collective, 1), cargo=cargo, serial=serial,
                order=self._order, in_line=each.slices is not None,
            )  # fmt: skip
        one = self.rates.latency_s + self.message_s(each.collective, int(np.argmax(each.whole)))
        fixed, now = one * self.messages(each.collective), list(entry)
        for group in each.groups(self.ranks):
            meeting = self.graph.add(group[0], after=[entry[rank] for rank in group])
            sent = [
                self.graph.add(
                    rank, each.collective, fixed, size=float(each.whole[rank]),
                    links=self._way_out(each, rank), after=[meeting], serial=serial, label=cargo,
                )
                for rank in group
            ]  # fmt: skip
            end = self.graph.add(group[0], after=sent)
            for rank in group:
                now[rank] = end
        return now

    def messages(self, collective: str) -> float:
        """Return the number of messages of the busiest rank in one call of a collective without listed messages."""
        counted = (self.prediction.traffic or {})[collective].counted
        return float(np.max(counted / np.maximum(1, self.calls[collective])))

    # Pipelines

    def _piped(self, plan: StepPlan, flow: Flow) -> list[int]:
        """Add the passes of a pipeline's schedule, then the exchanges that follow them, and the update."""
        now = Passes(self, plan, flow).add()
        after = [each for each in plan.exchanges if each.when.stage is None]
        late = [each for each in after if each.when.phase == "optimizer" and each.when.part == 1]
        for each in after:
            if each not in late:
                now = self.exchange(each, now)
        now = [self.compute(rank, "codec", self.times.codec, [op]) for rank, op in enumerate(now)]
        now = [self.compute(rank, "optimizer", self.updates[rank], [op]) for rank, op in enumerate(now)]
        for each in late:
            now = self.exchange(each, now)
        return now


def _calls(plan: StepPlan, ranks: int) -> dict[str, Ints]:
    """Return how often each rank takes part in each collective without listed messages."""
    found: dict[str, Ints] = {}
    for each in plan.exchanges:
        if each.whole is not None:
            calls = found.setdefault(each.collective, np.zeros(ranks, np.int64))
            for group in each.groups(ranks):
                calls[group] += 1
    return found


def _without_rounds(found: JobPrediction) -> StepPlan:
    """Return a plan with one exchange for each collective of a step, after the backward pass."""
    when = When("backward", 1.0, found.step.micro_batches - 1)
    exchanges = tuple(
        Exchange(name, when, whole=np.broadcast_to(sent.bytes, found.job.world_size))
        for name, sent in (found.traffic or {}).items()
    )
    return StepPlan(exchanges)
