"""Faults that slow a rank down: its computation takes as many times as long as they say."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
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
    a backward pass.
    """

    def build() -> Any:
        import torch
        from torch import nn

        file = folder / os.environ.get("RANK", "none")

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
                        lines.write(f"{forward_s} {time.thread_time() - begun[0]}\n")

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


def least_ratio(run: ss.Run, folder: Path, place: int, phase: str, *, is_slow: bool) -> float:
    """Time of a phase of rank 1 by its processor time, in the step with or without the fault in which that is least."""
    lines = (folder / "1").read_text().splitlines()[-STEPS:]
    computing = [float(line.split()[place]) for line in lines]
    lasted = [phase_seconds(event["spans"])[phase] for event in run.events("step", rank=1)]
    ratios = [each / own for each, own in zip(lasted, computing, strict=True)]
    return min(ratios[SLOW[0] : SLOW[1]] if is_slow else [*ratios[3 : SLOW[0] - 1], *ratios[SLOW[1] + 1 :]])


def test_real_computation_takes_the_factor_of_its_processor_time(tmp_path: Path) -> None:
    """Where others use the cores, a pass takes longer, so the step in which they did so least is compared."""
    run = ss.launch(small_job(model=busy(tmp_path), steps=STEPS, batch=512), faults=FAULT).wait(WITHIN_S)
    for place, phase in enumerate(("forward", "backward")):
        equal, slow = (least_ratio(run, tmp_path, place, phase, is_slow=is_slow) for is_slow in (False, True))
        assert 0.8 < slow / equal / FACTOR < 1.4, phase
    told = [event["text"] for event in run.events("fault")]
    assert told == ["rank 1 computes 3 times slower in steps 13 to 24"]
