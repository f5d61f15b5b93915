"""A rank of a tree or of a hierarchy dies: the run ends with one sentence that names it, and nothing is left."""

from __future__ import annotations

import os
import signal

import pytest

import shardscope as ss
from conformance.runs import all_gone, endless_job, family, rank_pids

pytestmark = pytest.mark.slow


@pytest.mark.sampled
@pytest.mark.parametrize("victim", [0, 3])
@pytest.mark.parametrize("strategy", ["tree", "hierarchical:2"])
def test_a_killed_rank_is_named(strategy: str, victim: int) -> None:
    run = ss.launch(endless_job(strategy=strategy, world_size=4))
    pids = rank_pids(run)
    processes = family(run)
    os.kill(pids[victim], signal.SIGKILL)
    with pytest.raises(
        ss.RunFailed, match=f"rank {victim} of strategy '{strategy}' was killed by SIGKILL"
    ) as failed:
        run.wait(60)
    assert failed.value.rank == victim
    assert failed.value.step >= 1
    assert run.summary().steps >= 1
    assert all_gone(processes)
