"""Faults that slow a rank down: its computation takes as many times as long as they say."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import shardscope as ss
from conformance.emulated import needs_namespaces
from conformance.runs import small_job
from shardscope.runlog.spans import phase_seconds

pytestmark = pytest.mark.slow

STEPS, SLOW, FACTOR, WITHIN_S = 32, (13, 24), 3.0, 120
FAULT = ss.Faults().slow(1, factor=FACTOR, steps=SLOW)


def busy(folder: Path) -> Callable[[], Any]:
    """Return a function that builds a model which computes for some ten milliseconds, and writes how long it did.

    It has few parameters, so that ranks hardly wait in exchanges. Each line has the processor times of a forward and of
    a backward pass, and how long the rank was told to sleep in both.
    """

    def build() -> Any:
        import torch
        from torch import nn

        file, slept = folder / os.environ.get("RANK", "none"), [0.0]

        def sleep(seconds: float) -> None:
            slept[0] += seconds
            time.sleep(seconds)

        if "RANK" in os.environ:
            from shardscope.training import compute_pace

            compute_pace.time = SimpleNamespace(**{**vars(time), "sleep": sleep})  # type: ignore[assignment]

        class Busy(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.first, self.again, self.last = (
                    nn.Linear(64, 256),
                    nn.Linear(256, 256),
                    nn.Linear(256, 10),
                )

            def forward(self, x: Any) -> Any:
                start = time.thread_time()
                first = x = self.first(x.flatten(1))
                for _ in range(24):
                    x = self.again(x).relu()
                x = self.last(x)
                if self.training and torch.is_grad_enabled():
                    self.write_times(first, x, time.thread_time() - start)
                return x

            def write_times(self, first: Any, last: Any, forward_s: float) -> None:
                begun: list[float] = []

                def end(_: Any) -> None:
                    with file.open("a") as lines:
                        lines.write(f"{forward_s} {time.thread_time() - begun[0]} {slept[0]}\n")
                    slept[0] = 0.0

                last.register_hook(lambda _: begun.append(time.thread_time()))
                first.register_hook(end)

        return Busy()

    return build


def shortest_s(run: ss.Run, rank: int, phase: str, *, is_slow: bool) -> float:
    """Shortest time of a phase of a rank, over the steps in which the fault is on or off, after the first of them."""
    first, last = SLOW
    rows = {
        event["step"]: phase_seconds(event["spans"], event.get("waited"))[phase]
        for event in run.events("step", rank=rank)
    }
    steps = range(first + 1, last + 1) if is_slow else [*range(4, first), *range(last + 2, STEPS + 1)]
    return min(rows[step] for step in steps)


def slower(run: ss.Run, rank: int, phase: str) -> float:
    return shortest_s(run, rank, phase, is_slow=True) / shortest_s(run, rank, phase, is_slow=False)


def test_emulated_computation_takes_the_stated_factor_of_its_time() -> None:
    needs_namespaces()
    cluster = ss.Cluster.emulated(nodes=1, per_node=2, flops="40 MFLOP/s")
    job = small_job(steps=STEPS, batch=32)
    run = ss.launch(job, cluster, faults=FAULT).wait(WITHIN_S)
    assert shortest_s(run, 1, "backward", is_slow=False) > 0.01, "long enough to be known well"
    for phase in ("forward", "backward"):
        assert slower(run, 1, phase) == pytest.approx(FACTOR, rel=0.1)
        assert slower(run, 0, phase) == pytest.approx(1, rel=0.1)


def test_real_computation_takes_the_factor_of_its_processor_time(tmp_path: Path) -> None:
    """Other programs on the cores make a pass longer, but not what the fault adds: the time that the rank sleeps."""
    run = ss.launch(small_job(model=busy(tmp_path), steps=STEPS, batch=512), faults=FAULT).wait(WITHIN_S)
    rows = [[*map(float, line.split())] for line in (tmp_path / "1").read_text().splitlines()[-STEPS:]]
    lasted = [phase_seconds(event["spans"]) for event in run.events("step", rank=1)]
    slow = range(
        SLOW[0], SLOW[1]
    )  # from the second slow step on: a backward pass sleeps as long as the last one says
    for place, phase in enumerate(("forward", "backward")):
        computing = sum(rows[at][place] for at in slow)
        assert sum(lasted[at][phase] for at in slow) > 0.9 * FACTOR * computing, phase
    ratios = [
        sum(rows[at][2] for at in steps) / sum(sum(rows[at][:2]) for at in steps)
        for steps in (slow, [*range(3, SLOW[0] - 1), *range(SLOW[1] + 1, STEPS)])
    ]
    assert ratios[0] < 1.3 * (FACTOR - 1)
    assert ratios[1] < 0.05
    told = [event["text"] for event in run.events("fault")]
    assert told == ["rank 1 computes 3 times slower in steps 13 to 24"]
