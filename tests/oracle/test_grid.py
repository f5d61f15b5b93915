"""A tenth of the grid that `tests/campaigns/grid.py` runs in whole: each job on real ranks against plain torch."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

import shardscope as ss
from oracle import grid, plain

pytestmark = pytest.mark.slow

CASES = {number: grid.draw(number, random.Random(f"0/{number}")) for number in range(0, grid.CASES, 10)}


@pytest.mark.sampled
@pytest.mark.parametrize(
    "case", CASES.values(), ids=[f"{n} {c.model} {c.strategy.label}" for n, c in CASES.items()]
)
def test_a_job_trains_what_one_process_trains_or_says_why_not(case: grid.Case, tmp_path: Path) -> None:
    ending = grid.hold(case, tmp_path)
    assert not ending.violation, f"{case}: {ending}"


@pytest.mark.sampled
@pytest.mark.parametrize("schedule", ["zero-bubble", "zbv", "dualpipev"])
def test_selective_recomputation_goes_with_a_split_backward_pass(schedule: str, tmp_path: Path) -> None:
    plan = plain.Plan(steps=3, batch=8, parts=4, settings={"lr": 0.05})
    case = grid.Case("deep", ss.Pipeline(schedule=schedule), 2, plan, micro_batch=2, recompute="selective")
    assert grid.hold(case, tmp_path).name == "equal"
