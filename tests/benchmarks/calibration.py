"""Calibrate twice, and predict jobs that no calibration has seen.

    python tests/benchmarks/calibration.py

Keep the machine quiet. Prints the seconds of both calibrations, which constants of the second one lie within the
intervals of the first, and the predicted beside the measured step times of the jobs, with the share of them that lies
within the 90 % intervals.
"""

from __future__ import annotations

import os
import tempfile
from statistics import median
from typing import Any

import shardscope as ss
from shardscope.calibration.calibration_view import scope
from shardscope.calibration.constants import amounts_text
from shardscope.measure.compare.measured import slowest_rank_s
from shardscope.runlog.spans import finished_steps

STEPS = 24
TEXT, IMAGES = "python-source", "digits"
JOBS: list[dict[str, Any]] = [
    {"model": "mlp", "data": IMAGES, "batch": 256},
    {"model": "cnn", "data": IMAGES, "batch": 128},
    {"model": "gpt-nano", "data": TEXT, "batch": 24},
    {"model": "gpt-micro", "data": TEXT, "batch": 8},
    {"model": "mlp", "data": IMAGES, "strategy": "zero-2", "world_size": 2, "batch": 256},
    {"model": "cnn", "data": IMAGES, "strategy": "all-reduce", "world_size": 2, "batch": 128},
    {"model": "gpt-nano", "data": TEXT, "strategy": "parameter-server", "world_size": 2, "batch": 16},
    {"model": "gpt-nano", "data": TEXT, "strategy": "pipeline", "world_size": 2, "batch": 16},
    {"model": "gpt-micro", "data": TEXT, "strategy": "gossip", "world_size": 2, "batch": 8},
    {"model": "mlp", "data": IMAGES, "strategy": "ring", "world_size": 3, "batch": 96},
    {"model": "mlp", "data": IMAGES, "strategy": "hierarchical", "world_size": 4, "batch": 256},
    {"model": "cnn", "data": IMAGES, "strategy": "zero-1", "world_size": 4, "batch": 256},
    {"model": "gpt-nano", "data": TEXT, "strategy": "ring", "world_size": 4, "batch": 24},
    {"model": "gpt-nano", "data": TEXT, "strategy": "zero-2", "world_size": 4, "batch": 24},
    {"model": "gpt-micro", "data": TEXT, "strategy": "tree", "world_size": 4, "batch": 16},
    {"model": "gpt-micro", "data": TEXT, "strategy": "zero-3", "world_size": 4, "batch": 8},
]


def agreement(first: ss.HostCalibration, second: ss.HostCalibration) -> None:
    """Print each constant of both calibrations, and how many of the second lie within the first's intervals."""
    others = {row.key: row.value for row in second.constants}
    inside = []
    for row in first.constants:
        value, again, low, high = amounts_text(row.name, row.value, others[row.key], row.low, row.high)
        inside.append(row.low <= others[row.key] <= row.high)
        print(
            f"  {row.name:20} {scope(row):14} {value:>7} then {again:>7}  ({low} to {high})"
            + ("" if inside[-1] else "  outside")
        )
    print(f"{sum(inside)} of {len(inside)} constants of the second lie within the intervals of the first")


def held_out(calibration: ss.HostCalibration) -> None:
    """Print predicted beside measured step times."""
    errors, covered = [], []
    with tempfile.TemporaryDirectory(prefix="shardscope-calibration-") as root:
        for fields in JOBS:
            job = ss.Job(steps=STEPS, **fields)
            found = ss.predict(job, calibration=calibration)
            run = ss.launch(job, root=root).wait(300)
            took = slowest_rank_s(finished_steps(run.events(), job.world_size))
            errors.append(found.step_time_s / took - 1)
            covered.append(found.interval.low <= took <= found.interval.high)
            print(
                f"  {job.label:32} {job.world_size} ranks  predicted {found.step_time_s * 1e3:7.1f} ms  measured "
                f"{took * 1e3:7.1f} ms  {errors[-1]:+.0%}{'' if covered[-1] else '  outside its interval'}"
            )
    sizes = [abs(error) for error in errors]
    print(
        f"{len(errors)} jobs: median |error| {median(sizes):.1%}, worst {max(sizes):.0%}; {sum(covered)} of "
        f"{len(covered)} within the 90 % interval"
    )


def main() -> None:
    """Print everything."""
    print(f"{len(os.sched_getaffinity(0))} cores, load {os.getloadavg()[0]:.1f}")
    first, second = (ss.calibrate(save=False) for _ in range(2))
    for name, found in (("first", first), ("second", second)):
        assert found.error is not None
        assert found.load_average is not None
        print(
            f"{name} calibration: {found.took_s:.0f} s (bar 60 s), {found.num_runs} runs, load "
            f"{found.load_average:.1f}, median error {found.error:.1%} on runs left out"
        )
    agreement(first, second)
    held_out(second)


if __name__ == "__main__":
    main()
