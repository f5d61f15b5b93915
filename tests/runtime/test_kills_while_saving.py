"""Runs killed while a checkpoint is written in the background: some cases of the campaign `checkpoint_kills`."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

import shardscope as ss
from conformance.runs import small_job

CAMPAIGNS = Path(__file__).parents[1] / "campaigns"


@pytest.mark.slow
@pytest.mark.timeout(120)
@pytest.mark.parametrize("victim", ["rank 1", "all"])
def test_a_good_older_checkpoint_is_left_and_a_run_goes_on_from_it(
    runs_root: Path, monkeypatch: pytest.MonkeyPatch, victim: str
) -> None:
    monkeypatch.syspath_prepend(str(CAMPAIGNS))
    import checkpoint_kills

    checkpoint = ss.Checkpoint(every=2, keep=3, asynchronous=True, incremental=True)
    job = small_job(steps=100_000, checkpoint=checkpoint)
    outcome = checkpoint_kills._killed(job, runs_root, victim, random.Random(victim))
    assert not outcome.violation, outcome
    assert outcome.name.startswith("resumed after a kill")
