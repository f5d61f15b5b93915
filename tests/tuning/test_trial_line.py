"""The line that a study prints for a trial that has ended."""

from __future__ import annotations

import pytest

from shardscope.tuning.progress import trial_line
from shardscope.tuning.records import TrialRecord


@pytest.mark.parametrize(
    ("state", "told"), [("pruned", "trial 5 beats it"), ("failed", "trial 5 beats it, estimated: loss 0.39")]
)
def test_only_why_a_trial_was_pruned_is_told_without_figures(state: str, told: str) -> None:
    reason = "trial 5 beats it, estimated: loss 0.39"
    unknown = {"run": None, "host": None, "measured": None, "retry_of": None}
    record = TrialRecord(7, state, {"lr": 0.01}, None, reason, "drawn", counted=True, pinned=False, **unknown)
    assert trial_line(record) == f"trial 7  {state}  lr=0.01  {told}"
