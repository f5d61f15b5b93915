"""Step times of a grid of jobs on emulated clusters: measured, against their predictions and simulations. Linux only.

python tests/benchmarks/emulated_grid.py measure FILE [seconds]
python tests/benchmarks/emulated_grid.py report FILE

`measure` runs one job after another and appends a line of JSON for each to FILE, until all have run three times or the
seconds are over; called again, it goes on. `report` predicts and simulates each combination and prints them beside the
measurements, with the spread from run to run: the median |deviation| of single runs from their median. So a change of
the formulas needs no new runs. Computation is emulated (150 ms of passes per step), so that eight nodes fit on few
cores. The constants are those that `ss.predict` takes; none of these jobs must have been used to fit them.
"""

from __future__ import annotations

import json
import os
import random
import statistics
import sys
import time
from collections.abc import Callable
from itertools import product
from math import comb
from pathlib import Path
from typing import Any, NamedTuple

import shardscope as ss

METHODS = (
    ("ring", "none"), ("parameter-server", "none"), ("zero-2", "none"), ("pipeline", "none"), ("ring", "int8")
)  # fmt: skip
NODES, RATES, WIDTHS = (2, 4, 8), ("100 Mbit/s", "1 Gbit/s"), (96, 192, 384)
LAYERS, SAMPLES, MICRO_BATCHES = 8, 8, 8
COMPUTE_S = 0.15
"""Time of the passes of one worker in a step, or of the passes of a pipeline without its bubble."""
STEPS, REPEATS = 8, 3


class Case(NamedTuple):
    """One combination."""

    strategy: str
    compression: str
    nodes: int
    rate: str
    width: int

    @property
    def key(self) -> str:
        return " ".join(map(str, self))


def perceptron(width: int) -> Callable[[], Any]:
    """Return a function that builds eight layers; the loss takes the first ten outputs for the digits."""

    def build() -> Any:
        from torch import nn

        first = nn.Sequential(nn.Flatten(), nn.Linear(64, width))
        return nn.Sequential(first, *(nn.Linear(width, width) for _ in range(LAYERS - 1)))

    build.__name__ = f"perceptron_{width}"
    return build


MODELS = {width: perceptron(width) for width in WIDTHS}


def flops_of(width: int) -> float:
    """Return the FLOPs of the forward and backward pass of one worker's samples."""
    return 3 * 2 * SAMPLES * ((LAYERS - 1) * width**2 + 64 * width)


def job_of(case: Case) -> tuple[ss.Job, Any]:
    """Return the job of a combination, and its cluster."""
    flops = flops_of(case.width)
    batch = ss.Batch(global_batch=SAMPLES * case.nodes)
    strategy: Any = case.strategy
    if case.strategy == "pipeline":
        strategy, batch = ss.Pipeline(split="even"), ss.Batch(SAMPLES * MICRO_BATCHES, micro_batch=SAMPLES)
        flops *= MICRO_BATCHES / case.nodes
    job = ss.Job(
        model=MODELS[case.width], data="digits", strategy=strategy, world_size=case.nodes, batch=batch, steps=STEPS,
        compression=case.compression, optimizer=ss.Optimizer("sgd", lr=0.01), eval_every=None,
    )  # fmt: skip
    return job, ss.Cluster.emulated(case.nodes, case.rate, flops=flops / COMPUTE_S, memory_bandwidth="2 GB/s")


def cases() -> list[Case]:
    """All combinations, in an order that mixes them."""
    found = [Case(*method, *rest) for method, *rest in product(METHODS, NODES, RATES, WIDTHS)]
    random.Random(0).shuffle(found)
    return found


def read(file: Path) -> dict[str, list[dict[str, Any]]]:
    """Return the lines of a file by combination."""
    found: dict[str, list[dict[str, Any]]] = {}
    for line in file.read_text().splitlines() if file.exists() else ():
        row = json.loads(line)
        found.setdefault(row["key"], []).append(row)
    return found


def measure(file: Path, seconds: float) -> None:
    """Run what has not run yet."""
    ends = time.monotonic() + seconds
    known = read(file)
    for repeat, case in product(range(REPEATS), cases()):
        if len(known.get(case.key, ())) > repeat:
            continue
        if time.monotonic() > ends:
            return
        job, cluster = job_of(case)
        run = ss.launch(job, cluster, made_by="grid").wait(300)
        summary = run.summary()
        row = {
            "key": case.key, "step_s": summary.step_time_s, "bytes": summary.bytes_per_step,
            "late_s": summary.late_s_per_step, "load": round(os.getloadavg()[0], 2),
            "terms": {row.term: row.measured for row in ss.compare(run).rows if row.group == "time"},
        }  # fmt: skip
        with file.open("a") as out:
            out.write(json.dumps(row) + "\n")


class Result(NamedTuple):
    """One combination's figures; errors are relative to the median of its runs."""

    case: Case
    measured_s: float
    spread: float
    predicted: float
    simulated: float
    worst_term: str
    bytes_agree: bool
    is_inside: bool | None
    """Whether the measured time is in the prediction's 90 % interval; None if there is none."""


def result(case: Case, rows: list[dict[str, Any]]) -> Result:
    """Predict and simulate a combination, and compare both with its runs."""
    job, cluster = job_of(case)
    found = ss.predict(job, cluster)
    assert found.time is not None
    times = [row["step_s"] for row in rows]
    measured = statistics.median(times)
    spread = statistics.median(abs(each / measured - 1) for each in times) if len(times) > 1 else float("nan")
    terms = {
        name: statistics.median(row["terms"].get(name) or 0.0 for row in rows) for name in rows[0]["terms"]
    }
    top = {part.name: part.value for part in found.time.parts}
    gaps = {name: top.get(name, 0.0) - (terms.get(name) or 0.0) for name in {*top, *PARTS}}
    worst = max(gaps, key=lambda name: abs(gaps[name]))
    interval = getattr(found, "interval", None)
    return Result(
        case, measured, spread, found.time.value / measured - 1,
        ss.simulate.predicted(found).step_time_s / measured - 1,
        f"{worst} {gaps[worst] / measured:+.0%}",
        bool(found.sent_bytes is not None and int(found.sent_bytes.sum()) == round(rows[0]["bytes"])),
        None if interval is None else interval[0] <= measured <= interval[1],
    )  # fmt: skip


PARTS = ("data", "forward", "backward", "optimizer", "codec", "communication", "idle")


def report(file: Path) -> None:
    """Print the table and its summary."""
    known = read(file)
    found = [result(case, known[case.key]) for case in cases() if case.key in known]
    found.sort(key=lambda each: each.case)
    print(f"{'case':44}  measured  spread  predicted  simulated  bytes  largest miss of a term")
    for each in found:
        print(
            f"{each.case.key:44} {each.measured_s:7.3f} s {each.spread:7.1%} {each.predicted:+10.1%} "
            f"{each.simulated:+10.1%}  {'exact' if each.bytes_agree else 'DIFFER'}  {each.worst_term}"
        )
    for name in ("all", *dict.fromkeys(f"{a} {b}" for a, b in METHODS)):
        chosen = [each for each in found if name == "all" or each.case.key.startswith(name + " ")]
        if chosen:
            print(f"{name:24} {len(chosen):3}: {_errors(chosen)}")
    loads = [row["load"] for rows in known.values() for row in rows]
    print(
        f"load while measuring: median {statistics.median(loads):.1f}, {min(loads):.1f} to {max(loads):.1f}"
    )
    print(f"bytes exact: {sum(each.bytes_agree for each in found)} of {len(found)}")
    _coverage([each.is_inside for each in found if each.is_inside is not None])


def _errors(found: list[Result]) -> str:
    words = [f"spread {statistics.median(each.spread for each in found):.1%}"]
    for name in ("predicted", "simulated"):
        errors = [abs(getattr(each, name)) for each in found]
        words.append(f"{name} |error| median {statistics.median(errors):.1%}, worst {max(errors):.1%}")
    return "; ".join(words)


def _coverage(inside: list[bool]) -> None:
    """Print how many measurements the 90 % intervals contain, and how likely so few or fewer are."""
    if not inside:
        return
    n, k = len(inside), sum(inside)
    fewer = sum(comb(n, i) * 0.9**i * 0.1 ** (n - i) for i in range(k + 1))
    print(f"90 % interval: {k} of {n} inside; probability of so few: {fewer:.3f}")


def main() -> None:
    """Measure, or report."""
    task, file, *rest = sys.argv[1:]
    if task == "measure":
        measure(Path(file), float(rest[0]) if rest else float("inf"))
    else:
        report(Path(file))


if __name__ == "__main__":
    main()
