"""Step times of hybrid layouts on emulated clusters: measured, against their predictions and simulations. Linux only.

python tests/benchmarks/emulated_mesh.py measure FILE [seconds]
python tests/benchmarks/emulated_mesh.py report FILE
python tests/benchmarks/emulated_mesh.py calculate

Forty layouts of data x tensor x pipeline parallelism and ZeRO train the same small GPT on four or eight devices of
equal speed, in nodes of one to four. The links between nodes are slow, so the placement of the axes matters. No
constant is fitted to these runs. `measure` runs the layouts and ends with the `report`, which also prints how well the
predicted and the simulated order of the layouts on each cluster agree with the measured one (Kendall's tau).
`calculate` runs nothing, and prints where predictions and simulations differ.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).parents[1]))

import shardscope as ss
from benchmarks._emulated_runs import JobOf, Result, kendall_tau, measure, print_report, results

MODEL, GLOBAL_BATCH, STEPS = "gpt-nano", 16, 7
FLOPS = "400 MFLOP/s"
"""Speed of a device, with which a step of the whole model takes several seconds: eight ranks on two cores keep up."""


class Case(NamedTuple):
    """One layout on one cluster."""

    nodes: int
    per_node: int
    rate: str
    data: int
    tensor: int
    pipeline: int
    zero: int
    micro_batch: int
    recompute: str = "none"
    schedule: str = "1f1b"
    virtual_stages: int = 1

    @property
    def cluster(self) -> str:
        """The cluster as text."""
        return f"{self.nodes}x{self.per_node} {self.rate}"

    @property
    def key(self) -> str:
        """The case as text, which begins with the cluster."""
        axes = f"d{self.data} t{self.tensor} p{self.pipeline} z{self.zero} b{self.micro_batch}"
        staged = "" if self.pipeline == 1 else f" {self.schedule}"
        again = "" if self.recompute == "none" else f" {self.recompute}"
        return f"{self.cluster} {axes}{staged}{again}"


SLOW, FAST = "20 Mbit/s", "200 Mbit/s"
CASES = (
    # data x tensor
    Case(2, 2, SLOW, 2, 2, 1, 0, 2),
    Case(2, 2, SLOW, 2, 2, 1, 1, 4),
    Case(2, 2, SLOW, 2, 2, 1, 2, 2),
    Case(2, 2, SLOW, 2, 2, 1, 3, 4),
    Case(2, 2, SLOW, 2, 2, 1, 1, 8, "selective"),
    Case(2, 2, SLOW, 1, 4, 1, 0, 4),
    Case(4, 1, SLOW, 2, 2, 1, 1, 2),
    Case(4, 1, FAST, 2, 2, 1, 0, 1),
    Case(4, 1, FAST, 1, 4, 1, 0, 4),
    Case(2, 2, FAST, 2, 2, 1, 3, 2, "full"),
    Case(4, 2, SLOW, 4, 2, 1, 0, 2),
    Case(4, 2, SLOW, 4, 2, 1, 1, 1),
    Case(4, 2, SLOW, 4, 2, 1, 2, 2),
    Case(4, 2, SLOW, 4, 2, 1, 3, 4),
    Case(4, 2, FAST, 4, 2, 1, 3, 2, "selective"),
    Case(4, 2, FAST, 2, 4, 1, 0, 4),
    Case(8, 1, FAST, 4, 2, 1, 1, 2),
    Case(2, 4, SLOW, 2, 4, 1, 0, 4),
    Case(2, 4, SLOW, 2, 4, 1, 1, 2, "full"),
    Case(2, 4, FAST, 2, 4, 1, 3, 4),
    # with a pipeline
    Case(2, 2, SLOW, 2, 1, 2, 0, 2),
    Case(2, 2, SLOW, 2, 1, 2, 1, 1),
    Case(2, 2, SLOW, 1, 2, 2, 0, 2),
    Case(2, 2, SLOW, 1, 2, 2, 0, 4, "full"),
    Case(2, 2, FAST, 2, 1, 2, 2, 2, "none", "gpipe"),
    Case(4, 1, SLOW, 2, 1, 2, 1, 2),
    Case(4, 1, FAST, 1, 2, 2, 0, 1),
    Case(4, 1, FAST, 2, 1, 2, 3, 2),
    Case(4, 2, SLOW, 2, 2, 2, 0, 2),
    Case(4, 2, SLOW, 2, 2, 2, 1, 1),
    Case(4, 2, SLOW, 4, 1, 2, 1, 1),
    Case(4, 2, SLOW, 1, 2, 4, 0, 1),
    Case(4, 2, FAST, 2, 2, 2, 1, 2, "selective"),
    Case(4, 2, FAST, 2, 2, 2, 0, 1, "none", "interleaved", 2),
    Case(4, 2, FAST, 2, 1, 4, 1, 1),
    Case(8, 1, FAST, 2, 2, 2, 1, 2),
    Case(8, 1, FAST, 4, 1, 2, 0, 1, "none", "zb-h1"),
    Case(2, 4, SLOW, 2, 2, 2, 1, 2, "none", "gpipe"),
    Case(2, 4, SLOW, 1, 4, 2, 0, 2),
    Case(2, 4, FAST, 1, 4, 2, 0, 2, "full"),
)


def job_of(case: Case) -> tuple[ss.Job, Any]:
    """Return the job of a layout, and its cluster."""
    layout = ss.Layout(
        data=case.data, tensor=case.tensor, pipeline=case.pipeline, zero=case.zero, micro_batch=case.micro_batch,
        global_batch=GLOBAL_BATCH, recompute=case.recompute,
        **({"schedule": case.schedule, "virtual_stages": case.virtual_stages} if case.pipeline > 1 else {}),
    )  # fmt: skip
    strategy: dict[str, Any] = {}
    if (
        case.pipeline > 1
    ):  # times of layers measured on busy cores would cut the stages differently in each run
        stages = ss.Pipeline(schedule=case.schedule, virtual_stages=case.virtual_stages, split="even")
        strategy = {"strategy": ss.Strategy("mesh", stages=stages)}
    job = ss.Job(
        model=MODEL, data="python-source", layout=layout, steps=STEPS, eval_every=None,
        optimizer=ss.Optimizer("adamw", lr=1e-3), **strategy,
    )  # fmt: skip
    cluster = ss.Cluster.emulated(
        case.nodes, case.rate, per_node=case.per_node, flops=FLOPS, memory_bandwidth="2 GB/s"
    )
    return job, cluster


def jobs() -> dict[str, JobOf]:
    """Return all layouts by name."""
    return {case.key: partial(job_of, case) for case in CASES}


def print_order(found: Sequence[Result], name: str, time_of: Callable[[Result], float]) -> None:
    """Print the rank correlation of calculated and measured times, over all layouts and on each cluster."""
    clusters = dict.fromkeys(case.cluster for case in CASES)
    groups = [[each for each in found if each.key.startswith(f"{cluster} ")] for cluster in clusters]
    taus = [
        kendall_tau([time_of(each) for each in group], [each.measured_s for each in group])
        for group in (found, *groups)
        if len(group) > 2
    ]
    of_clusters = taus[1:] or taus
    print(
        f"Kendall's tau of {name} and measured times: {taus[0]:.3f} over all; on each of the {len(taus) - 1} clusters "
        f"with 3 or more layouts: median {statistics.median(of_clusters):.2f}, lowest {min(of_clusters):.2f}"
    )


def calculate() -> None:
    """Print the predicted and the simulated time of each layout."""
    differences = []
    for key, job_of in jobs().items():
        found = ss.predict(*job_of())
        assert found.step_time_s is not None
        simulated = ss.simulate.predicted(found).step_time_s
        differences.append(found.step_time_s / simulated - 1)
        print(
            f"{key:48} predicted {found.step_time_s:6.3f} s, simulated {simulated:6.3f} s, {differences[-1]:+6.1%}",
            flush=True,
        )
    sizes = [abs(each) for each in differences]
    print(f"|difference| median {statistics.median(sizes):.1%}, worst {max(sizes):.1%}")


def main() -> None:
    """Measure, report or calculate."""
    task, *rest = sys.argv[1:]
    if task == "calculate":
        calculate()
        return
    file = Path(rest[0])
    if task == "measure":
        measure(file, jobs(), seconds=float(rest[1]) if rest[1:] else float("inf"))
    found = results(file, jobs())
    print_report(file, found, dict.fromkeys(case.cluster for case in CASES), width=48)
    if len(found) > 2:
        print_order(found, "predicted", lambda each: each.predicted_s)
        print_order(found, "simulated", lambda each: each.simulated_s)


if __name__ == "__main__":
    main()
