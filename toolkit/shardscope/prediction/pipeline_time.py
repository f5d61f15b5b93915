"""Time of a pipeline's passes in a job, and the time that its ranks wait for messages and for collectives."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from shardscope.analytic.communication.network import Level
from shardscope.analytic.communication.plan import Exchange, Flow, Moves, StepPlan
from shardscope.analytic.communication.traffic import Sent
from shardscope.analytic.job_step import JobStep
from shardscope.analytic.schedules import DURATIONS, Timeline, Transfers
from shardscope.analytic.schedules.stage_passes import PHASE_OF, pass_flops
from shardscope.prediction.loads import awaited, rank_loads
from shardscope.prediction.rates import RankRates


def pass_seconds(step: JobStep, flow: Flow, forward_s: float, backward_s: float) -> dict[str, list[float]]:
    """Return the seconds of each type of pass (``F``, ``B``, ``I`` and ``W``) of one micro-batch, by stage.

    Args:
        step: The step of the ranks along the pipeline axis.
        flow: The passes of its pipeline.
        forward_s: Seconds of all forward passes of the rank that the step waits for.
        backward_s: Seconds of all backward passes of that rank.
    """
    loads = rank_loads(step)
    whole = sum(each.computing for each in loads) / awaited(step, loads).computing
    table = flow.table
    costs = [
        cost * step.slow(table.stage_ranks[stage])
        for stage, cost in enumerate(flow.stage_costs or (1.0,) * table.num_stages)
    ]
    share = table.num_stages / sum(costs)
    recomputed = step.job.backward_passes - DURATIONS["B"]
    flops = {
        op: [pass_flops(op, stage, recomputed) * cost * share for stage, cost in enumerate(costs)]
        for op in DURATIONS
    }
    forward, backward = (
        sum(flops[op.op][op.stage] for op in table.ops if (op.op == "F") is is_forward)
        for is_forward in (True, False)
    )
    seconds = dict.fromkeys("BIW", backward_s * whole / backward / flow.passes)
    seconds["F"] = forward_s * whole / forward / flow.passes
    return {op: [seconds[op] * each for each in row] for op, row in flops.items()}


def exposed_messages_s(
    flow: Flow, sent: Sent, rates: RankRates, costs: Sequence[float], *, later: Sequence[float] = ()
) -> tuple[float, float]:
    """Return the seconds of a step for which ranks wait for messages between stages, and then for later collectives.

    The first is the longest time from a rank's first to its last pass with messages, minus the same time without
    messages. Messages travel while ranks compute, as far as the order of the schedule allows; see `Transfers`. If ranks
    meet after the last pass, it is the time of the whole schedule instead.

    Copies of the pipeline start together and share links evenly, so they stay in step: a message takes as long as the
    links need for those of all copies.

    A rank sends its messages in the order in which they become ready. A faster rank may therefore change the order for
    the worse, and if messages take longer than passes, a step then takes longer, by up to 9 % in 5,000 random jobs: a
    scheduling anomaly (Graham 1969, Bounds on multiprocessing timing anomalies).

    Args:
        flow: The passes of the step's pipeline.
        sent: Traffic of the messages between stages.
        rates: Link rates.
        costs: Seconds of each operation in the schedule.
        later: Seconds that each rank needs after its last pass; empty for none.
    """
    table, transfers = flow.table, Transfers.of(flow.table)
    sends = [0.0] * len(costs)
    for i, op in enumerate(table.ops):
        message = flow.crossing(op.op, op.stage)
        if message is not None:
            carried_s = _carried_s(rates, flow.ranks(transfers.ranks[i]), flow.ranks(message[0]), message[1])
            sends[i] = carried_s + rates.latency_s + rates.per_message_s(flow.sends, sent, carried_s)
    with_them, without = transfers.timeline(costs, sends), Timeline.of(table, costs, 0.0)
    longest = max(_spans(flow, with_them))
    all_s = (
        [end + own for end, own in zip(_spans(flow, with_them), later, strict=True)] if later else [longest]
    )
    return flow.passes * (longest - max(_spans(flow, without))), max(all_s) - longest


def _spans(flow: Flow, line: Timeline) -> list[float]:
    """Return the time of a pass through the schedule on each rank: from its own first pass, or from any if all meet."""
    if flow.ranks_meet:
        return [line.end] * len(line.bounds)
    return [line.ends[last - 1] - line.starts[first] for first, last in line.bounds]


class Waits(NamedTuple):
    """Seconds for which the passes of a pipeline, and ranks after their last pass, wait for collectives.

    The time of a collective is divided among its calls in proportion to their bytes.
    """

    passes: list[float]
    """Mean seconds within each operation of the schedule, over the passes of a step."""
    later: list[float]
    """Seconds of each rank after its last pass."""
    shares: tuple[dict[str, float], dict[str, float]]
    """Seconds of each collective on the busiest rank, within passes and after the last."""

    @classmethod
    def of(cls, plan: StepPlan, seconds: Callable[[StepPlan, int], Mapping[str, float]]) -> Waits:
        """Return the waits for the exchanges of a plan.

        Args:
            plan: The messages of a step.
            seconds: Function that returns the seconds of each collective of a plan in which only the copies of a rank
                take part.
        """
        flow = plan.flow
        assert flow is not None
        count = sum(op.op == "F" and op.stage == 0 for op in flow.table.ops)
        within: dict[tuple[str, int | None, int], float] = {}
        later, shares = [0.0] * len(flow.table.ranks), (dict[str, float](), dict[str, float]())
        for rank in range(len(later)):
            mine = [(each, _bytes(each, flow.ranks(rank))) for each in plan.exchanges]
            mine = [(each, size) for each, size in mine if size]
            took = seconds(StepPlan(tuple(each for each, _ in mine)), rank)
            whole = dict[str, float]()
            for each, size in mine:
                whole[each.collective] = whole.get(each.collective, 0.0) + size
            sums: tuple[dict[str, float], dict[str, float]] = ({}, {})
            for each, size in mine:
                share = took[each.collective] * size / whole[each.collective]
                if each.when.stage is None:
                    later[rank] += share
                else:
                    key = each.when.phase, each.when.stage, each.when.micro_batch % count
                    within[key] = within.get(key, 0.0) + share / flow.passes
                own = sums[each.when.stage is None]
                own[each.collective] = own.get(each.collective, 0.0) + share
            for found, own in zip(shares, sums, strict=True):
                found.update({name: max(found.get(name, 0.0), own[name]) for name in own})
        ops = [within.get((PHASE_OF[op.op], op.stage, op.microbatch), 0.0) for op in flow.table.ops]
        return cls(ops, later, shares)


def exposed_s(
    plan: StepPlan, waits: Waits, sent: Sent, rates: RankRates, costs: Sequence[float]
) -> dict[str, float]:
    """Return the seconds by which each collective, and the messages between stages, make a step longer.

    Args:
        plan: The messages of a step.
        waits: What passes and ranks wait for.
        sent: Traffic of the messages between stages.
        rates: Link rates.
        costs: Seconds of each operation in the schedule, without waits.
    """
    flow = plan.flow
    assert flow is not None
    longer = [cost + wait for cost, wait in zip(costs, waits.passes, strict=True)]
    alone, together = (max(_spans(flow, Timeline.of(flow.table, each, 0.0))) for each in (costs, longer))
    messages_s, later_s = exposed_messages_s(flow, sent, rates, longer, later=waits.later)
    found = {flow.sends: messages_s}
    for shares, exposed in zip(waits.shares, (flow.passes * (together - alone), later_s), strict=True):
        for name, share in shares.items():
            found[name] = found.get(name, 0.0) + exposed * share / (sum(shares.values()) or 1.0)
    return found


def _bytes(exchange: Exchange, ranks: range) -> int:
    """Return the bytes that some of the ranks send in an exchange."""
    if exchange.whole is not None:
        return int(exchange.whole[ranks].sum())
    return sum(move.num_bytes for each in exchange.rounds for move in each.moves if move.source in ranks)


def _carried_s(rates: RankRates, sources: range, targets: range, num_bytes: int) -> float:
    """Return the seconds in which links carry a message from each of the sources to its target, all at once."""
    if rates.network is None:
        return num_bytes / rates.link
    moves = Moves("", np.array(sources), np.array(targets), np.full(len(sources), num_bytes))
    return rates.network.seconds([Level(rates.network.loads(moves))])
