"""Time of a step's collectives where messages share links: several ranks per node, unequal nodes, or racks."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from shardscope.analytic.communication import Traffic
from shardscope.analytic.communication.network import Level, Network, levels_of
from shardscope.analytic.communication.plan import (
    Exchange,
    Flow,
    Move,
    Moves,
    Round,
    StepPlan,
    message_slices,
)
from shardscope.analytic.communication.ring import Floats, Ints
from shardscope.analytic.communication.traffic import Sent
from shardscope.analytic.job_step import JobStep

MOST_LISTED = 64
"""Maximum number of ranks for which messages are always listed one by one."""
MOST_MESSAGES = 1 << 14
"""Maximum number of messages listed for more ranks than that; a tree or a star has few messages per rank."""
_BOUND = 1e-2
"""Fraction by which a sum of levels must exceed the busiest link's time to count as a bound; with nearly equal chunks,
it exceeds it by less."""


@dataclass
class Load:
    """Load of one collective on the links, for one call or for all calls in a step.

    Attributes:
        seconds: Time for which the collective occupies the links, in seconds.
        bytes: Bytes on each link.
        is_bound: Whether `seconds` adds up levels that have different busiest links, which may overlap.
        is_assumed: Whether messages are assumed to go from each rank to the next, because the real ones are unknown.
        hops: Number of messages that are sent one after another, not counting slices; None if unknown.
    """

    bytes: Floats
    seconds: float = 0.0
    is_bound: bool = False
    is_assumed: bool = False
    hops: int | None = None

    def busiest(self, network: Network) -> int:
        """Return the link that takes longest to carry its bytes."""
        return int((self.bytes / network.capacity).argmax())


@dataclass
class StepLoads:
    """The loads of all collectives of a step.

    Attributes:
        network: The links.
        loads: Load by collective.
        too_many: Whether there are too many messages to list them.
        is_even: Whether all ranks have equal links of their own, so that the destinations of messages do not matter.
    """

    network: Network
    loads: dict[str, Load] = field(default_factory=dict)
    too_many: bool = False
    is_even: bool = False

    @classmethod
    def of(cls, step: JobStep, traffic: Traffic, network: Network, *, is_even: bool = False) -> StepLoads:
        """Return the loads of a step's collectives; messages not listed by a plan are assumed to go from each rank to
        the next.
        """
        plan = step_plan(step, traffic)
        if plan is not None:
            return cls.of_plan(plan, traffic, network, is_even=is_even)
        found = cls(network, too_many=are_too_many(step, traffic), is_even=is_even)
        for name, sent in traffic.items():
            found._add_whole(name, sent.busiest)
        return found

    @classmethod
    def of_plan(
        cls, plan: StepPlan, traffic: Traffic, network: Network, *, is_even: bool = False
    ) -> StepLoads:
        """Return the loads of the messages of a plan."""
        found = cls(network, is_even=is_even)
        slices = message_slices(plan, traffic)
        for each in plan.exchanges:
            found._add(each, each.slices or slices.get(each.collective, 1))
        if plan.flow is not None:
            found._add_levels(plan.flow.sends, [Level(network.loads(Moves.of(_sends(plan.flow))))], 1)
        return found

    @property
    def assumptions(self) -> tuple[str, ...]:
        """Sentences on what was assumed about messages."""
        assumed = [name for name, load in self.loads.items() if load.is_assumed and not self.is_even]
        bounds = [name for name, load in self.loads.items() if load.is_bound]
        told = []
        if assumed and self.too_many:
            told.append(
                f"The messages of {', '.join(assumed)} are too many to list one by one: with more than {MOST_LISTED} "
                f"ranks, the limit is {MOST_MESSAGES} in a step. They are assumed to go from each rank to the next; on "
                "links that are not equal, the time may be far too short."
            )
        elif assumed:
            told.append(
                f"The messages of {', '.join(assumed)} are not known one by one; on links that are not equal, they are "
                "assumed to go from each rank to the next."
            )
        if bounds:
            told.append(
                f"The levels of {', '.join(bounds)} are limited by different links, and their times are added; "
                "messages of different levels may overlap, which ss.simulate takes into account."
            )
        return tuple(told)

    def carried_s(self, collective: str, sent: Sent) -> float | None:
        """Return the time for which the links carry one message of each rank, in seconds; None if no bytes are sent."""
        load = self.loads.get(collective)
        return None if load is None else load.seconds / max(1.0, float(np.max(sent.counted)))

    def _add(self, each: Exchange, slices: int) -> None:
        if each.whole is not None:
            self._add_whole(each.collective, each.whole, each.towards)
        else:
            levels = levels_of(self.network, each.rounds)
            self._add_levels(each.collective, levels, slices)
            load = self.loads[each.collective]
            load.hops = (load.hops or 0) + (0 if each.is_attached else len(levels))

    def _add_whole(self, name: str, sent: Ints, towards: Ints | None = None) -> None:
        size = np.broadcast_to(sent, len(self.network.node_of))
        moves = to_next(size) if towards is None else Moves("", np.arange(len(size)), towards, size)
        self._add_levels(name, [Level(self.network.loads(moves))], 1)
        self.loads[name].is_assumed = True

    def _add_levels(self, name: str, levels: list[Level], slices: int) -> None:
        load = self.loads.setdefault(name, Load(np.zeros(len(self.network.names))))
        num_bytes = sum((each.bytes for each in levels), np.zeros(len(self.network.names)))
        seconds = self.network.seconds(levels, slices)
        load.seconds += seconds
        load.bytes = load.bytes + num_bytes
        load.is_bound |= seconds > self.network.seconds([Level(num_bytes)]) * (1 + _BOUND)


def step_plan(step: JobStep, traffic: Traffic) -> StepPlan | None:
    """Return the messages of a step one by one; None if the strategy has no plan, or there are too many messages."""
    plan: StepPlan | None = None if are_too_many(step, traffic) else step.job.strategy.plan(step)
    return plan


def are_too_many(step: JobStep, traffic: Traffic) -> bool:
    """Whether a step has too many messages to list them."""
    sent = sum(int(np.broadcast_to(each.counted, step.world_size).sum()) for each in traffic.values())
    return step.world_size > MOST_LISTED and sent > MOST_MESSAGES


def to_next(sent: Ints) -> Moves:
    """Return messages from each rank to the next one."""
    ranks = np.arange(len(sent))
    return Moves("", ranks, (ranks + 1) % len(sent), np.asarray(sent))


def _sends(flow: Flow) -> Round:
    """Return all messages between the stages of a pipeline in a step."""
    moves = []
    for op in flow.table.ops:
        message = flow.crossing(op.op, op.stage)
        if message is not None:
            pairs = zip(flow.ranks(flow.table.stage_ranks[op.stage]), flow.ranks(message[0]), strict=True)
            moves += [Move(*pair, message[1] * flow.passes) for pair in pairs]
    return Round("", tuple(moves))
