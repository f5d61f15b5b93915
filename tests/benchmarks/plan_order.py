"""The planner's order of layouts against the order in which they run on an emulated cluster. Linux only.

python tests/benchmarks/plan_order.py measure FILE [--model NAME] [--sample N] [--seconds S]
python tests/benchmarks/plan_order.py report FILE [--model NAME]

For three small models, `ss.plan` lists all layouts that fit on an emulated cluster of two nodes of four devices with a
slow uplink, and each of these jobs runs on that cluster: `measure` appends to FILE, and goes on where it stopped. With
--sample, N layouts of each model run: the half that is ranked first, and as many drawn by a fixed seed from the others.
`report` prints the predicted, simulated and measured step time of each, the measured time of the plan ranked first over
the best measured time (bar: 1.03), and Kendall's tau; for the planner's order, and for its formula, which decides which
layouts the planner times if there are many.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from functools import cache, partial
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).parents[1]))

import shardscope as ss
from benchmarks._emulated_runs import JobOf, Result, kendall_tau, measure, print_report, results
from shardscope.analytic.layouts import Layouts
from shardscope.planner.jobs import formula_s
from shardscope.planner.plans import PlanRow, Plans

NODES, PER_NODE, UPLINK, UPDATES = 2, 4, "20 Mbit/s", "2 GB/s"
FLOPS = {"gpt-nano": "400 MFLOP/s", "gpt-micro": "1.2 GFLOP/s", "moe-nano": "500 MFLOP/s"}
"""Speed of a device by model, with which a step of the whole model takes several seconds: two cores keep up."""
GLOBAL_BATCH, STEPS = 16, 7
FIX = {"micro_batch": [1, 2, 4], "schedule": ["gpipe", "1f1b", "interleaved", "zb-h1"]}


class Case(NamedTuple):
    """One plan of a model, as a job."""

    plan: PlanRow
    job: ss.Job


def cluster_of(model: str) -> Any:
    """Return the emulated cluster of a model."""
    return ss.Cluster.emulated(NODES, UPLINK, per_node=PER_NODE, flops=FLOPS[model], memory_bandwidth=UPDATES)


@cache
def plans_of(model: str) -> Plans:
    """Return all plans of a model for its emulated cluster."""
    return ss.plan(model, cluster_of(model), global_batch=GLOBAL_BATCH, top=None, fix=FIX)


@cache
def cases(model: str) -> dict[str, Case]:
    """Return all plans of a model by name, in the planner's order."""
    plans = plans_of(model)
    jobs = [
        plans.rehearsal(rank, steps=STEPS).job.replace(eval_every=None) for rank in range(1, len(plans) + 1)
    ]
    return {f"{model} {name_of(plan.layout)}": Case(plan, job) for plan, job in zip(plans, jobs, strict=True)}


def name_of(layout: ss.Layout) -> str:
    """Return a layout in short."""
    axes = "".join(
        f" {axis[0]}{getattr(layout, axis)}"
        for axis in ("data", "tensor", "pipeline", "context", "expert")
        if getattr(layout, axis) > 1
    )
    virtual = f"x{layout.virtual_stages}" if layout.virtual_stages > 1 else ""
    staged = f" {layout.schedule}{virtual}" if layout.pipeline > 1 else ""
    shard = f"/{layout.shard}" if layout.shard else ""
    again = "" if layout.recompute == "none" else f" {layout.recompute}"
    cut = " sp" if layout.sequence_parallel else ""
    return f"{axes.strip()} z{layout.zero}{shard} b{layout.micro_batch}{staged}{again}{cut}"


def sampled(model: str, sample: int | None) -> dict[str, Case]:
    """Return all cases of a model, or a sample: those ranked first, and others."""
    every = cases(model)
    if sample is None or sample >= len(every):
        return every
    first, others = [*every][: (sample + 1) // 2], [*every][(sample + 1) // 2 :]
    chosen = {*first, *Random(0).sample(others, sample - len(first))}
    return {key: case for key, case in every.items() if key in chosen}


def jobs(models: Sequence[str], sample: int | None) -> dict[str, JobOf]:
    """Return the jobs of several models by name, with their clusters."""
    return {
        key: partial(lambda job, model: (job, cluster_of(model)), case.job, model)
        for model in models
        for key, case in sampled(model, sample).items()
    }


def print_order(model: str, found: Sequence[Result]) -> None:
    """Print how well the planned orders of a model's layouts agree with the measured one."""
    own = [each for each in found if each.key.startswith(f"{model} ")]
    if len(own) < 2:
        return
    measured, every = [each.measured_s for each in own], cases(model)
    plans, setting = [every[each.key].plan for each in own], plans_of(model).setting
    orders = {
        "the planner": [plan.step_time_s for plan in plans],
        "its formula": [float(formula_s(setting, Layouts.of([plan.layout]))[0]) for plan in plans],
        "ss.simulate": [each.simulated_s for each in own],
    }
    for name, times in orders.items():
        first = min(range(len(own)), key=times.__getitem__)
        print(
            f"{model}, {len(own)} of {len(every)} layouts, ranked by {name}: the first, {own[first].key}, takes "
            f"{measured[first] / min(measured):.3f} of the best measured time; Kendall's tau "
            f"{kendall_tau(times, measured):.3f}"
        )
    print(f"{model}: the best measured is {own[measured.index(min(measured))].key}, {min(measured):.3f} s")


def main() -> None:
    """Measure, or report."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("task", choices=["measure", "report"])
    parser.add_argument("file", type=Path)
    parser.add_argument("--model", choices=FLOPS)
    parser.add_argument("--sample", type=int)
    parser.add_argument("--seconds", type=float, default=float("inf"))
    given = parser.parse_args()
    models = [given.model] if given.model else [*FLOPS]
    if given.task == "measure":
        measure(given.file, jobs(models, given.sample), seconds=given.seconds, repeats=1)
        return
    found = results(given.file, jobs(models, None))
    print_report(given.file, found, models, width=56)
    for model in models:
        print_order(model, found)


if __name__ == "__main__":
    main()
