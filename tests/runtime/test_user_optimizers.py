"""User-defined optimizers in runs that lose a rank or change size: weights as of an undisturbed run."""

from __future__ import annotations

import pytest

import shardscope as ss
from conformance import elastic
from conformance.runs import small_job
from shardscope.runtime.tools.check import read_parameters
from training.optim.user_optimizers import UserOptimizer

BOUND = 1e-5
"""That of the equivalence of a job with the same job on another number of ranks."""


def job_of(**changes: object) -> ss.Job:
    fields: dict[str, object] = {"optimizer": UserOptimizer(type_name="EveryForm"), "precision": "fp64"}
    return small_job(**{**fields, "record": ss.Record(parameters=True), **changes})


@pytest.mark.slow
@pytest.mark.sampled
@pytest.mark.parametrize("strategy", ["ring", "zero-3", "zero-1", "zero-2", "pipeline"])
def test_a_run_that_recovers_from_a_copy_in_memory_ends_at_the_same_bits(strategy: str) -> None:
    recovery = ss.Recovery(2, replica_every=1)
    run = ss.launch(job_of(strategy=strategy, recovery=recovery), faults=ss.Faults().kill(1, step=7)).wait(
        120
    )
    assert run.state_text == "completed after 1 restart", run.error or run.reason
    assert [event["source"] for event in run.events("restart")] == ["replica"]
    plain = read_parameters(ss.launch(job_of(strategy=strategy)).wait(120))
    assert {name: value.tobytes() for name, value in read_parameters(run).items()} == {
        name: value.tobytes() for name, value in plain.items()
    }


@pytest.mark.slow
@pytest.mark.sampled
@pytest.mark.parametrize("strategy", ["zero-3", "ring", "zero-1", "zero-2", "pipeline:1f1b"])
@pytest.mark.parametrize("recovery", [None, ss.Recovery(1, replica_every=1000)], ids=["disk", "memory"])
def test_a_run_that_changes_size_ends_as_one_of_a_fixed_size(
    strategy: str, recovery: ss.Recovery | None
) -> None:
    job = elastic.elastic_job(
        strategy=strategy, recovery=recovery, optimizer=UserOptimizer(type_name="EveryForm"), precision="fp64"
    )
    run = elastic.resized(job, 4, 3)
    assert [(each.before, each.after) for each in run.reduced().resizes] == [(2, 4), (4, 3)]
    assert max(elastic.apart(run, elastic.fixed(job.replace(recovery=None)))) < BOUND
