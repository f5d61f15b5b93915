"""The planner's order of layouts against the order in which they run on an emulated cluster. Linux only.

python tests/benchmarks/plan_order.py measure FILE [--sample N] [--seconds S]
python tests/benchmarks/plan_order.py report FILE

For three small models, `ss.plan` lists all layouts that fit on two nodes of four devices with a slow uplink. Each that
jobs can train runs on an emulated cluster of the same rates (`measure` appends to FILE, and goes on where it stopped);
with --sample, N of each model, drawn by a fixed seed, and always the plan that is ranked first. `report` prints the
predicted and the measured step time of each, the measured time of the plan ranked first over the best measured time
(bar: 1.03), and Kendall's tau; for the ranking by `ss.predict` of the job, and for the planner's own formula.
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
from shardscope.calibration.calibration import Calibration
from shardscope.planner.plans import PlanRow, Plans
from shardscope.spec.cluster.emulated import PAYLOAD

NODES, PER_NODE, UPLINK, UPDATES = 2, 4, "20 Mbit/s", "2 GB/s"
FLOPS = {"gpt-nano": "400 MFLOP/s", "gpt-micro": "1.2 GFLOP/s", "moe-nano": "500 MFLOP/s"}
"""Speed of a device by model, with which a step of the whole model takes several seconds: two cores keep up."""
UPLINK_OF_DEVICE = 20e6 / 8 / PER_NODE
"""A device's part of its node's link, in bytes per second: links of a planned cluster are those of one device."""
GLOBAL_BATCH, STEPS = 16, 7
FIX = {"offload": "none", "micro_batch": [1, 2, 4], "schedule": ["gpipe", "1f1b", "interleaved", "zb-h1"]}
STATED = Calibration(
    name="emulated", source="stated", matmul_efficiency=1, attention_efficiency=1, unfused_efficiency=1, half_size=0,
    memory_efficiency=1, launch_s=0, collective_s=0.0005, inter_efficiency=PAYLOAD, pipeline_efficiency=PAYLOAD,
    shard_overlap=0, optimizer_efficiency=0.001, step_s=0.005,
)  # fmt: skip
"""Constants for the planner's own formula: computation takes FLOPs / rate, and operations without products no time."""


class Case(NamedTuple):
    """One plan of a model, as a job."""

    plan: PlanRow
    job: ss.Job


def cluster_of(model: str) -> Any:
    """Return the emulated cluster of a model."""
    return ss.Cluster.emulated(NODES, UPLINK, per_node=PER_NODE, flops=FLOPS[model], memory_bandwidth=UPDATES)


@cache
def plans_of(model: str) -> Plans:
    """Return all plans of a model for devices with the rates of the emulated ones."""
    known = ss.Cluster.of("a100-80gb", nodes=NODES, per_node=PER_NODE)
    device = known.device.replace(
        name="emulated", peak_flops={"fp32": FLOPS[model]}, memory_bandwidth="2 TB/s", source="emulated"
    )
    cluster = known.replace(
        device=device, inter=known.inter.replace(bandwidth=UPLINK_OF_DEVICE, latency_s=0.0)
    )
    return ss.plan(
        model, cluster, global_batch=GLOBAL_BATCH, top=None, precision="fp32", fix=FIX, software="any",
        calibration=STATED,
    )  # fmt: skip


@cache
def cases(model: str) -> dict[str, Case]:
    """Return the plans of a model that jobs can train, by name, in the planner's order; print how many cannot."""
    found, refused = {}, dict[str, int]()
    for plan in plans_of(model):
        try:
            job = job_of(model, plan.layout)
        except ss.SpecError as error:
            reason = str(error).rpartition("; ")[0]
            refused[reason] = refused.get(reason, 0) + 1
            continue
        found[f"{model} {name_of(plan.layout)}"] = Case(plan, job)
    print(f"{model}: {len(found)} of {len(plans_of(model))} plans are jobs; not these:")
    for reason, count in sorted(refused.items(), key=lambda each: -each[1]):
        print(f"    {count:4} {reason}")
    return found


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


def job_of(model: str, layout: ss.Layout) -> ss.Job:
    """Return the job of a layout, whose stages are cut evenly, as the planner assumes."""
    strategy: dict[str, Any] = {}
    if layout.pipeline > 1:
        stages = ss.Pipeline(schedule=layout.schedule, virtual_stages=layout.virtual_stages, split="even")
        is_alone = layout.num_devices == layout.pipeline
        strategy = {"strategy": stages if is_alone else ss.Strategy("mesh", stages=stages)}
    return ss.Job(model=model, data="python-source", layout=layout, steps=STEPS, eval_every=None, **strategy)


def sampled(model: str, sample: int | None) -> dict[str, Case]:
    """Return all cases of a model, or a sample that includes the one that the planner ranks first."""
    every = cases(model)
    if sample is None or sample >= len(every):
        return every
    chosen = {next(iter(every)), *Random(0).sample([*every], sample)}
    return {key: case for key, case in every.items() if key in chosen}


def jobs(sample: int | None) -> dict[str, JobOf]:
    """Return the jobs of all models by name, with their clusters."""
    return {
        key: partial(lambda job, model: (job, cluster_of(model)), case.job, model)
        for model in FLOPS
        for key, case in sampled(model, sample).items()
    }


def print_order(model: str, found: Sequence[Result]) -> None:
    """Print how well the predicted orders of a model's layouts agree with the measured one."""
    own = [each for each in found if each.key.startswith(f"{model} ")]
    if len(own) < 2:
        return
    measured, every = [each.measured_s for each in own], cases(model)
    orders = {
        "ss.predict": [each.measured_s * (1 + each.predicted) for each in own],
        "the planner": [every[each.key].plan.step_time_s for each in own],
    }
    for name, times in orders.items():
        first = min(range(len(own)), key=times.__getitem__)
        print(
            f"{model}, {len(own)} layouts, ranked by {name}: the first, {own[first].key}, takes "
            f"{measured[first] / min(measured):.3f} of the best measured time; Kendall's tau "
            f"{kendall_tau(times, measured):.3f}"
        )


def main() -> None:
    """Measure, or report."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("task", choices=["measure", "report"])
    parser.add_argument("file", type=Path)
    parser.add_argument("--sample", type=int)
    parser.add_argument("--seconds", type=float, default=float("inf"))
    given = parser.parse_args()
    if given.task == "measure":
        measure(given.file, jobs(given.sample), seconds=given.seconds, repeats=1)
        return
    found = results(given.file, jobs(None))
    print_report(given.file, found, FLOPS, width=56)
    for model in FLOPS:
        print_order(model, found)


if __name__ == "__main__":
    main()
