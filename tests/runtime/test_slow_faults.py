"""Faults that slow a rank down: its computation takes as many times as long as they say."""

from __future__ import annotations

from typing import Any

import pytest

import shardscope as ss
from conformance.emulated import needs_namespaces
from conformance.runs import small_job
from shardscope.runlog.spans import phase_seconds

pytestmark = pytest.mark.slow

STEPS, SLOW, FACTOR, WITHIN_S = 24, (11, 18), 3.0, 120
FAULT = ss.Faults().slow(1, factor=FACTOR, steps=SLOW)


def wide() -> Any:
    """A model that computes for some ten milliseconds."""
    from torch import nn

    return nn.Sequential(
        nn.Flatten(), nn.Linear(64, 1024), nn.ReLU(), nn.Linear(1024, 1024), nn.Linear(1024, 10)
    )


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


def test_real_computation_takes_the_factor_of_its_processor_time() -> None:
    """Spans also count waiting for a core, so the shortest of several steps are compared, on ranks that take turns."""
    run = ss.launch(small_job(model=wide, steps=STEPS, batch=512), faults=FAULT).wait(WITHIN_S)
    for phase in ("forward", "backward"):
        assert FACTOR * 0.75 < slower(run, 1, phase) < FACTOR * 1.5
        assert 0.6 < slower(run, 0, phase) < 1.5
