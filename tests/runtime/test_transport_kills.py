"""Kills while ranks communicate through shared memory; `tests/campaigns/transport_kills.py` tries 200 of them."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest

from conformance.kill_points import POINTS
from conformance.kills import Kernel, draw


@pytest.fixture(scope="module")
def kernels() -> Iterator[list[Kernel]]:
    kernels: list[Kernel] = []
    yield kernels
    for kernel in kernels:
        kernel.close()


CASES = [
    *(("rank", point) for point in POINTS),
    ("agent", "message"),
    ("server", "set-up"),
    ("kernel", "collective"),
]


@pytest.mark.slow
@pytest.mark.parametrize(("victim", "point"), CASES)
def test_a_kill_at_a_random_call_leaves_nothing_and_is_named(
    victim: str, point: str, kernels: list[Kernel]
) -> None:
    if not kernels or not kernels[-1].is_alive:
        kernels.append(Kernel())
    case = draw(random.Random(f"{victim}/{point}"), victim, point)
    ending = kernels[-1].kill(case)
    assert not ending.was_missed, case
    assert not ending.faults, (case, ending.details)
