"""Jitter of a run: which of its steps count, and what is said if ranks shared cores."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

import shardscope as ss
from conformance.runs import small_job
from shardscope.measure import jitter

pytestmark = pytest.mark.timeout(120)


@pytest.mark.filterwarnings("ignore:2 ranks of run")  # on a machine with one core
def test_steps_that_faults_slowed_down_or_that_were_repeated_are_left_out(tmp_path: Path) -> None:
    job = small_job(world_size=2, steps=14, checkpoint=8, recovery=1)
    faults = ss.Faults().slow(1, factor=5, steps=(6, 7)).kill(1, step=12)
    run = ss.launch(job, faults=faults, root=tmp_path).wait(90)
    assert run.summary().lost_steps == 3
    assert ss.jitter(run).num_steps == 14 - 2 - 2 - 3  # without warm-up, slow steps and repeated ones


@pytest.mark.parametrize(
    ("fields", "warns"),
    [
        ({"world_size": 4}, True),
        ({"world_size": 2}, False),
        ({"world_size": 4, "cluster": ss.Cluster.emulated(nodes=4, flops="1 GFLOP/s")}, False),
        ({"world_size": 4, "gpus": ["H100"]}, False),
    ],
)
def test_a_warning_says_that_ranks_shared_cores(fields: dict[str, Any], warns: bool) -> None:
    machine = {"cores": 2.0, "gpus": fields.pop("gpus", [])}
    about = {
        "id": "one",
        "cluster": None,
        **fields,
        "job": small_job(),
        "provenance": SimpleNamespace(machine=machine),
    }
    run = cast("ss.Run", SimpleNamespace(**about))
    if warns:
        with pytest.warns(UserWarning, match="4 ranks of run one shared 2 cores"):
            jitter._warn_of_shared_cores(run)
    else:
        jitter._warn_of_shared_cores(run)
