"""Jitter of a run: which of its steps count, and what is said if ranks shared cores."""

from __future__ import annotations

import os
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

import shardscope as ss
from conformance.runs import small_job
from shardscope.measure import jitter
from shardscope.measure.scaling.scaling import jitter_wait_s

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


SLEEP_S, SPREAD = 0.04, 0.25


def sleepy():  # type: ignore[no-untyped-def]
    """A model whose forward pass sleeps for a log-normal time, with the mean `SLEEP_S`."""
    from torch import nn

    source = np.random.default_rng(int(os.environ.get("RANK", "0")))

    class Sleepy(nn.Sequential):
        def forward(self, x):  # type: ignore[no-untyped-def]
            if self.training:
                time.sleep(SLEEP_S * float(np.exp(SPREAD * source.standard_normal() - SPREAD**2 / 2)))
            return super().forward(x)

    return Sleepy(nn.Flatten(), nn.Linear(64, 10))


@pytest.fixture(scope="module")
def uneven(tmp_path_factory: pytest.TempPathFactory) -> ss.Run:
    job = small_job(model=sleepy, world_size=3, steps=42, batch=12)
    return ss.launch(job, root=tmp_path_factory.mktemp("runs"), preflight=False).wait(90)


@pytest.mark.filterwarnings("ignore:3 ranks of run")
def test_injected_jitter_is_measured_and_tells_the_slowest_of_thousands(uneven: ss.Run) -> None:
    found = ss.jitter(uneven)
    assert found.within == pytest.approx(SPREAD, rel=0.35)
    times = np.stack([*jitter.computing_times(uneven).values()], axis=1)
    assert times.shape == (40, 3)
    two = ss.jitter(uneven, ranks=(0, 2))
    assert float(two.slowest_s(3)) == pytest.approx(times.max(axis=1).mean(), rel=0.2)
    injected = (
        SLEEP_S
        * np.exp(SPREAD * np.random.default_rng(5).standard_normal((500, 4096)) - SPREAD**2 / 2)
        .max(axis=1)
        .mean()
    )
    assert float(found.slowest_s(4096)) - found.mean_s == pytest.approx(injected - SLEEP_S, rel=0.5)


@pytest.mark.filterwarnings("ignore:3 ranks of run")
def test_an_extrapolated_run_waits_for_the_slowest_of_more_ranks(uneven: ss.Run) -> None:
    found = ss.extrapolate(uneven, workers=(3, 64))
    own, far = found.points
    assert (own.measured_s, own.run, far.measured_s) == (uneven.summary().step_time_s, uneven.id, None)
    assert own.jitter_wait_s is not None
    assert far.jitter_wait_s is not None
    assert far.jitter_wait_s > 1.5 * own.jitter_wait_s > 0
    assert own.interval_s is None  # one measurement says nothing about the spread of others
    on_gpus = ss.extrapolate(uneven, ss.Cluster.of("a100-80gb", nodes=1, per_node=1), workers=(4,))
    assert f"The jitter was measured on the ranks of run {uneven.id}" in on_gpus.note
    plain = ss.extrapolate(uneven.job, workers=(64,)).points[0]
    assert plain.jitter_wait_s is None
    assert far.predicted_s == pytest.approx(plain.predicted_s + far.jitter_wait_s)
    assert "jitter_wait_s" in found.frame().columns
    assert "jitter_wait_s" not in ss.extrapolate(uneven.job, workers=(3,)).frame().columns


def test_only_ranks_that_wait_for_each_other_are_slowed_down_by_jitter() -> None:
    known = ss.analytic.stragglers.Jitter(0.1, 0.05, 0.1, 8, 100)

    def waits(**changes: Any) -> float:
        job = small_job(**{"world_size": 8, "batch": 48, **changes})
        return jitter_wait_s(ss.predict(job), known)

    assert waits() > waits(compression=ss.Compression("local-sgd", every=4)) > 0
    assert waits(strategy="parameter-server:async") == 0
    assert waits(strategy="pipeline", world_size=4) == 0
    backups = waits(strategy=ss.ParameterServer(backups=2))
    assert 0 < backups < waits(strategy="parameter-server")


@pytest.mark.parametrize("ranks", [(0,), (0, 0), (0, 7)])
def test_ranks_that_cannot_be_compared_are_refused(uneven: ss.Run, ranks: tuple[int, ...]) -> None:
    with pytest.raises(
        ss.SpecError, match=r"ranks=.*; give at least 2 of the ranks that compute, which are 0, 1, 2"
    ):
        ss.jitter(uneven, ranks=ranks)
