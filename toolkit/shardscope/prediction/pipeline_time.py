"""Time of a pipeline's passes in a job, and the time that its ranks wait for messages between stages."""

from __future__ import annotations

import numpy as np

from shardscope.analytic.communication.plan import Flow
from shardscope.analytic.communication.traffic import Sent
from shardscope.analytic.job_step import JobStep
from shardscope.analytic.schedules import DURATIONS, Timeline, Transfers
from shardscope.prediction.loads import awaited, rank_loads
from shardscope.prediction.rates import RankRates


def pass_seconds(step: JobStep, flow: Flow, forward_s: float, backward_s: float) -> dict[str, list[float]]:
    """Return the seconds of each type of pass (``F``, ``B``, ``I`` and ``W``) of one micro-batch, by stage.

    Args:
        step: The step.
        flow: The passes of its pipeline.
        forward_s: Seconds of all forward passes of the rank that the step waits for.
        backward_s: Seconds of all backward passes of that rank.
    """
    loads = rank_loads(step)
    whole = sum(each.computing for each in loads) / awaited(step, loads).computing
    table = flow.table
    count = sum(op.op == "F" for op in table.ops) * flow.passes
    costs = [
        cost * step.slow(table.stage_ranks[stage])
        for stage, cost in enumerate(flow.stage_costs or (1.0,) * table.num_stages)
    ]
    share = table.num_stages / sum(costs)
    unit = backward_s * whole / count / DURATIONS["B"]
    seconds = {op: unit * DURATIONS[op] for op in "BIW"} | {"F": forward_s * whole / count}
    return {op: [each * cost * share for cost in costs] for op, each in seconds.items()}


def exposed_messages_s(flow: Flow, sent: Sent, rates: RankRates, passes: dict[str, list[float]]) -> float:
    """Return the seconds of a step for which the busiest rank waits for messages between stages, beyond the bubble.

    This is the longest time from a rank's first to its last pass with messages, minus the same time without messages.
    Messages travel while ranks compute, as far as the order of the schedule allows; see `Transfers`.

    A link carries messages in the order in which they become ready. A faster rank may therefore change the order for
    the worse, and if messages take longer than passes, a step then takes longer, by up to 9 % in 5,000 random jobs: a
    scheduling anomaly (Graham 1969, Bounds on multiprocessing timing anomalies).

    Args:
        flow: The passes of the step's pipeline.
        sent: Traffic of the messages between stages.
        rates: Link rates.
        passes: Result of `pass_seconds`.
    """
    table, transfers = flow.table, Transfers.of(flow.table)
    costs = [passes[op.op][op.stage] for op in table.ops]
    sends = [0.0] * len(costs)
    for i, op in enumerate(table.ops):
        message = flow.crossing(op.op, op.stage)
        if message is not None:
            link = _rate(rates, transfers.ranks[i], message[0])
            carried_s = message[1] / link
            sends[i] = carried_s + rates.latency_s + rates.per_message_s(sent, carried_s)
    lines = transfers.timeline(costs, sends), Timeline.of(table, costs, 0.0)
    with_them, without = (line.end if flow.ranks_meet else line.step_time for line in lines)
    return flow.passes * (with_them - without)


def _rate(rates: RankRates, source: int, target: int) -> float:
    """Return the bytes per second of the slowest link between two ranks."""
    if rates.network is None:
        return rates.link
    ways = rates.network.ways(np.array([source]), np.array([target]))[0]
    return float(rates.network.capacity[ways[ways >= 0]].min())
