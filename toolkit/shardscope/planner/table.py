"""The ranked plans as a table of text with units, for notebooks and widgets."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from shardscope.analytic.recomputation import layers_of_stage
from shardscope.planner.explain import seconds
from shardscope.prediction.budget import Throughput
from shardscope.prediction.failures import layout_failures
from shardscope.show import Table
from shardscope.spec.pipeline_schedule import PipelineSchedule
from shardscope.spec.units import gib_text, three_digits

if TYPE_CHECKING:
    from shardscope.planner.plans import PlanRow, Plans
    from shardscope.spec.layout import Layout

SHOWN = 15
DAY_S = 86_400.0
SPARE = 0.05
"""Fraction of a device's memory below which a plan leaves little for errors of the prediction."""
NO_BREAK = "\u00a0"
"""Space between a number and its unit, which stay on one line in a narrow table."""
KEY = (
    "data, tensor, pipeline, context, expert: degrees of parallelism; sp: sequence parallel; ZeRO 1 over 2: sharded "
    "over 2 of the replicas; ×2: 2 stages per rank; full, 3 of 8: only 3 of a stage's 8 layers are recomputed; "
    "MFU: model FLOPs utilization. Schedules other than gpipe, 1f1b and interleaved split the backward pass to shrink "
    "the bubble; few frameworks support them"
)
"""Explanation of the columns."""


class Budget(NamedTuple):
    """Time in days and cost in US dollars of training on a number of tokens; no cost if the cluster has no price."""

    tokens: float
    days: float
    dollars: float | None


def recommended(found: Plans) -> PlanRow:
    """Return the first plan of the table that leaves memory for errors of the prediction; the best if none does."""
    shown = found.order[: len(found)]
    spare, held = found.headroom_bytes[shown], found.memory_bytes[shown]
    roomy = np.flatnonzero(spare >= SPARE * (spare + held))
    rank = int(roomy[0]) + 1 if len(roomy) else 1
    return found.row(int(found.order[rank - 1]), rank=rank)


def advice(found: Plans) -> str:
    """Return why a plan is recommended: the memory that it leaves free, compared with the first plan."""
    best, plan = found.best, recommended(found)
    if is_full(best):
        if plan.rank == 1:
            return (
                f"Every plan nearly fills the memory: plan 1 leaves only {_free(best)} free, less than the error that "
                "the prediction may have."
            )
        longer = plan.step_time_s / best.step_time_s - 1
        return (
            f"Plan {plan.rank} takes {abs(longer):.1%} {'longer' if longer >= 0 else 'less'} than plan 1, but leaves "
            f"{_free(plan)} of memory free instead of {_free(best)}, in case the prediction is too low."
        )
    return f"Plan 1 leaves {_free(best)} of memory free, in case the prediction is too low."


def is_full(plan: PlanRow) -> bool:
    """Return whether a plan leaves little memory for errors of the prediction."""
    return plan.headroom_bytes < SPARE * (plan.memory_bytes + plan.headroom_bytes)


def _free(plan: PlanRow) -> str:
    return gib_text(plan.headroom_bytes)


def budget_of(found: Plans, plan: PlanRow, tokens: float) -> Budget:
    """Return the time and the cost of training on a number of tokens with a plan, without evaluations.

    The time includes checkpoints and failures if the cluster has a failure rate.
    """
    failures = layout_failures(found.setting.model, found.setting.cluster, plan.layout)
    rate = Throughput(plan.tokens_per_s, found.setting.cluster, failures)
    dollars = None if plan.dollars is None else rate.dollars(tokens)
    return Budget(tokens, rate.time_to_train(tokens) / DAY_S, dollars)


def offload_text(found: Plans) -> str:
    """Return a sentence that says that layouts fit only with offloading; empty if some fit without."""
    return "It fits only with offloading to the host." if found.needs_offload else ""


def days_text(days: float) -> str:
    """Format days as ``3.20 h``, ``12.5 days`` or ``4.10 years``."""
    if days < 1:
        return f"{_three_digits(24 * days)} h"
    return f"{_three_digits(days)} days" if days < 1000 else f"{_three_digits(days / 365.25)} years"


def dollars_text(dollars: float) -> str:
    """Format an amount as ``$2.60``, ``$845 k`` or ``$1.20 M``."""
    for unit, size in (("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if dollars >= size:
            return f"${_three_digits(dollars / size)} {unit}"
    return f"${dollars:.2f}" if 0.01 <= dollars < 100 else f"${three_digits(dollars)}"


def _three_digits(value: float) -> str:
    """Format like `three_digits`, but with trailing zeros, so that ``3.30`` aligns with ``3.22`` in a column."""
    return f"{value:#.3g}".rstrip(".") if 1e-4 <= value < 100 else three_digits(value)


def table_rows(
    found: Plans, count: int = SHOWN, *, tokens: float | None = None
) -> tuple[list[str], list[list[str]]]:
    """Return header and cells of the first `count` plans as a table, without columns that are empty in all of them.

    Args:
        found: Result of the search.
        count: Maximum number of rows.
        tokens: Number of tokens to train on; adds the time and the cost of the whole training.
    """
    paid = ("time to train", "cost") if tokens else ("tokens/s", "cost of a step")
    header = (
        "plan", "step", "MFU", "memory", "data", "tensor", "pipeline", "context", "expert", "ZeRO", "schedule",
        "micro-batch", "recompute", "offload", "compression", "software", *paid,
    )  # fmt: skip
    rows = [_cells(found, found[place], tokens) for place in range(min(count, len(found)))]
    told = [place for place in range(len(header)) if any(row[place] for row in rows)]
    return [header[place] for place in told], [[row[place] for place in told] for row in rows]


def _cells(found: Plans, plan: PlanRow, tokens: float | None) -> list[str]:
    layout = plan.layout
    zero = f"{layout.zero} over {layout.shard}" if layout.shard else str(layout.zero)
    schedule: str = "" if layout.pipeline == 1 else layout.schedule
    if schedule and PipelineSchedule(layout.schedule).most_stages is None:
        schedule = f"{schedule} ×{layout.virtual_stages}"
    cells = [
        plan.rank, seconds(plan.step_time_s), f"{plan.mfu:.1%}", gib_text(plan.memory_bytes),
        layout.data, f"{layout.tensor}{' sp' * layout.sequence_parallel}",
        layout.pipeline, layout.context, layout.expert if found.setting.model.mixture else "", zero, schedule,
        layout.micro_batch, _recompute(found, layout), layout.offload, layout.axis("compression"),
        plan.software if len(found.software) > 1 else "", *_paid(found, plan, tokens),
    ]  # fmt: skip
    return ["" if cell == "none" else str(cell).replace(" ", NO_BREAK) for cell in cells]


def _recompute(found: Plans, layout: Layout) -> str:
    """Return what a layout recomputes, with the number of layers per stage if it does not recompute all layers."""
    if not layout.recompute_layers:
        return layout.recompute
    stages = layout.pipeline * layout.virtual_stages
    return f"{layout.recompute}, {layout.recompute_layers} of {layers_of_stage(found.setting.model.layers, stages)}"


def _paid(found: Plans, plan: PlanRow, tokens: float | None) -> tuple[str, ...]:
    if not tokens:
        return f"{plan.tokens_per_s:,.0f}", "" if plan.dollars is None else dollars_text(plan.dollars)
    whole = budget_of(found, plan, tokens)
    return days_text(whole.days), "" if whole.dollars is None else dollars_text(whole.dollars)


def table_of(found: Plans) -> Table:
    """Return the first plans as a table with units, and how many more there are."""
    more = f"{len(found) - SHOWN} more plans, and all values as numbers: plans.frame. "
    return Table(*table_rows(found), more=f"{more * (len(found) > SHOWN)}{KEY}.")
