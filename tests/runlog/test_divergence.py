"""Which losses count as diverged."""

from __future__ import annotations

import numpy as np
import pytest

from shardscope.runlog.divergence import divergence_of


@pytest.mark.parametrize(
    ("losses", "step"),
    [
        ([2.3, 2.2, 90.0, 500.0, 2000.0], 3),
        ([2.33, 2.5e14], 2),
        ([2.33, 2.5e14, float("nan")], 2),
        ([2.3, 2.2, 9.0], None),
        ([2.3, 2.5, 2.6, 2.4, 2.5], None),
        ([5.0], None),
        ([5.5, 900.0, 400.0, 60.0, 9.0, 8.0, 7.0, 7.0], 2),
        ([5.5, 900.0, 400.0, 60.0, 9.0, 8.0, 7.0, 5.0], 2),
        ([5.5, 900.0, 400.0, 60.0, 9.0, 4.0, 4.0, 4.0], None),
        ([5.5, 900.0, 7.0, 6.0, 6.0], None),
        ([2.3] * 20 + [50.0] * 3 + [2.2] * 4 + [2.4], None),
        ([2.3] + [50.0] * 3 + [0.5] * 1000 + [12.0], None),  # one bad batch at the end, long after
        ([0.5] + [0.51] * 99 + [4.0, 5.0, 4.0] + [0.51] * 200, None),  # back where it was
        ([2.3, 2.4, 3.0, 6.0, 90.0, 500.0, 80.0] + [4.0] * 20, 5),  # the rise is no level to be back at
    ],
)
def test_a_lasting_or_huge_rise_or_one_without_recovery_is_a_divergence(
    losses: list[float], step: int | None
) -> None:
    found = divergence_of(range(1, len(losses) + 1), losses)
    assert (None if found is None else found.step) == step


def test_noise_on_a_plateau_does_not_turn_a_spike_into_a_divergence() -> None:
    def is_alarmed(seed: int) -> bool:
        losses = 0.5 + 0.05 * np.random.default_rng(seed).standard_normal(300)
        losses[100:103] = 4.0, 5.0, 4.0
        return divergence_of(range(1, 301), losses) is not None

    assert sum(map(is_alarmed, range(200))) == 0
