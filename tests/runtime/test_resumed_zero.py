"""Runs under ZeRO go on from checkpoints, with other ranks and under other strategies."""

from __future__ import annotations

import pytest

import shardscope as ss
from conformance.runs import small_job

pytestmark = pytest.mark.slow

ALL = ["zero-1", "zero-2", "zero-3"]


def test_labels_tell_the_settings_apart() -> None:
    strategies = [ss.Zero1(), ss.Zero2(collectives="backend"), ss.Zero3(replicas=2), ss.Zero3(offload=True)]
    assert [s.label for s in strategies] == ["zero-1", "zero-2:backend", "zero-3 x2", "zero-3 offload"]
    assert small_job(strategy="zero-2:backend").strategy == strategies[1]


RESUMES = [
    ("zero-1", 3, "zero-1", 2),
    ("zero-2", 4, "zero-2", 2),
    ("zero-3", 3, "zero-3", 2),
    ("zero-3", 2, "zero-1", 3),
    ("zero-1", 2, "ring", 2),
    ("ring", 2, "zero-3", 3),
]


@pytest.mark.sampled
@pytest.mark.parametrize(("first", "first_size", "then", "then_size"), RESUMES)
def test_a_run_goes_on_under_other_ranks_as_if_never_stopped(
    first: str, first_size: int, then: str, then_size: int
) -> None:
    fields = {"batch": 48, "optimizer": "lamb", "precision": "fp64", "lr_schedule": ss.LRSchedule("cosine")}
    whole = ss.launch(small_job(strategy="single", world_size=1, steps=6, **fields))
    half = ss.launch(
        small_job(
            strategy=first,
            world_size=first_size,
            steps=6,
            checkpoint=ss.Checkpoint(every=3, keep=2),
            **fields,
        )
    )
    expected = whole.wait(60).summary()
    half.wait(60)
    (half.path / "checkpoints" / "step-6").rename(half.path / "step-6")  # as if it had ended after step 3
    resumed = ss.launch(small_job(strategy=then, world_size=then_size, steps=6, **fields), resume=half).wait(
        60
    )
    assert [event["step"] for event in resumed.events("step") if event["rank"] == 0] == [4, 5, 6]
    assert resumed.summary().loss == pytest.approx(
        expected.loss, rel=1e-11
    )  # what updates 4 and 5 have led to


@pytest.mark.sampled
@pytest.mark.parametrize("strategy", ALL)
@pytest.mark.parametrize("optimizer", ["adamw", ss.Optimizer("sgd", momentum=0.0), "nesterov", "lars"])
def test_every_optimizer_resumes(strategy: str, optimizer: object) -> None:
    fields = {"batch": 48, "optimizer": optimizer, "strategy": strategy, "precision": "fp64", "steps": 4}
    half = ss.launch(small_job(checkpoint=ss.Checkpoint(every=2), **fields)).wait(60)
    (half.path / "checkpoints" / "step-4").rename(half.path / "step-4")
    resumed = ss.launch(small_job(**fields), resume=half).wait(60)
    assert resumed.summary().test_loss == pytest.approx(half.summary().test_loss, rel=1e-12)
