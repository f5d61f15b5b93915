"""The planner's answer: whether a model fits, which plan to run, and the numbers on which people base the decision."""

from __future__ import annotations

from typing import NamedTuple

from shardscope.planner import Plans, short
from shardscope.planner.explain import seconds
from shardscope.planner.plans import PlanRow
from shardscope.planner.table import advice, budget_of, days_text, dollars_text, offload_text, recommended
from shardscope.prediction.failures import failures_text, layout_failures
from shardscope.prediction.layout import uncertainty_of
from shardscope.spec.units import gib_text, work_text
from shardscope_widgets.words import count_text, plural


class PlanNumber(NamedTuple):
    """One number of a plan, shown in large type, with a short explanation."""

    name: str
    value: str
    about: str


def verdict(found: Plans) -> str:
    """Return yes or no: whether the model fits on the cluster."""
    cluster = found.asked.cluster
    on = f"{cluster.num_devices:,} device{'s' * (cluster.num_devices > 1)} ({cluster.name})"
    if not len(found):
        return f"No layout of {found.asked.model.name} fits on {on}."
    return f"{found.asked.model.name} fits on {on}. {offload_text(found)}".strip()


def reason(found: Plans) -> str:
    """Return why no layout fits, and what would help."""
    work = work_text(found.global_batch, found.asked.model.seq)
    return f"{work[0].upper()}{work[1:]}: {found.problem}."


def numbers(found: Plans, plan: PlanRow, tokens: float) -> tuple[PlanNumber, ...]:
    """Return the six numbers of a plan: step, training time, utilization, memory, cost and devices.

    Args:
        found: Result of the search.
        plan: One of its plans.
        tokens: Number of tokens to train on.
    """
    model, cluster, _ = found.setting
    calibration = found.asked.setting(plan.layout).calibration
    low, high = map(seconds, uncertainty_of(model, cluster, plan.layout, calibration).interval)
    whole, room = budget_of(found, plan, tokens), plan.memory_bytes + plan.headroom_bytes
    cost, price = "unknown", "the cluster has no price"
    if whole.dollars is not None and plan.dollars is not None:
        cost, price = dollars_text(whole.dollars), f"{dollars_text(plan.dollars)} per step"
    where = f"{plural(cluster.num_nodes, 'node')}, {cluster.device.name}"
    return (
        PlanNumber("Step time", seconds(plan.step_time_s), f"90% interval: {low} to {high}"),
        PlanNumber(f"{count_text(tokens)} tokens", days_text(whole.days), f"{count_text(plan.tokens_per_s)} tokens/s"),
        PlanNumber("MFU", f"{plan.mfu:.1%}", "of peak FLOP/s"),
        PlanNumber("Peak memory", gib_text(plan.memory_bytes), f"of {gib_text(room)} per device"),
        PlanNumber("Cost", cost, price),
        PlanNumber("Devices", f"{cluster.num_devices:,}", where),
    )  # fmt: skip


def failures(found: Plans, plan: PlanRow) -> str:
    """Return the cost of failures on this cluster; empty if the cluster has no failure rate."""
    model, cluster, _ = found.setting
    return failures_text(layout_failures(model, cluster, plan.layout), cluster.num_devices)


def plans_text(plans: Plans, *, tokens: float | None = None) -> str:
    """Return sentences on whether the model fits, the recommended plan and the fastest, or why there is none.

    Args:
        plans: Result of the search.
        tokens: Number of tokens to train on; adds the time and the cost of the whole training.
    """
    if not len(plans):
        return f"{verdict(plans)} {reason(plans)}"
    plan = recommended(plans)
    step, whole, mfu, memory, cost, _ = numbers(plans, plan, tokens or 1.0)
    shown = (
        f"Plan {plan.rank} is recommended: {step.value} per step ({step.about}), MFU {mfu.value}, {memory.value} "
        f"{memory.about}: {short(plan.layout)}; {work_text(plans.global_batch, plans.asked.model.seq)}."
    )
    told = [verdict(plans), shown, advice(plans)]
    if tokens:
        dollars = "" if plan.dollars is None else f" and costs {cost.value}"
        told.append(f"Training on {count_text(tokens)} tokens takes {whole.value}{dollars}.")
    return " ".join(filter(None, [*told, failures(plans, plan)]))
