"""A model that was asked to be kept is on disk before it is looked at, whatever the look then raises."""

from __future__ import annotations

import os
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import shardscope as ss
from conformance.runs import small_job


class Outputs(nn.Module):
    """A linear model whose outputs are not one tensor."""

    def __init__(self, form: str) -> None:
        super().__init__()
        self.form, self.head = form, nn.Linear(64, 10)

    def forward(self, images: Tensor) -> Any:
        scores = self.head(images.flatten(1))
        return {"scores": scores, "again": scores} if self.form == "dict" else (scores, scores)


def loss_of(output: Any, target: Tensor) -> Tensor:
    scores = output["scores"] if isinstance(output, dict) else output[0]
    return nn.functional.cross_entropy(scores, target)


KEPT = {"checkpoint": ss.Checkpoint(at_end=True), "record": ss.Record(parameters=True), "steps": 3}


@pytest.mark.sampled
@pytest.mark.parametrize("form", ["tuple", "dict"])
@pytest.mark.parametrize("strategy", ["single", "ring"])
def test_outputs_that_are_no_class_scores_have_a_loss_and_no_accuracy(strategy: str, form: str) -> None:
    world_size = 1 if strategy == "single" else 2
    job = small_job(
        model=lambda: Outputs(form), loss=loss_of, strategy=strategy, world_size=world_size, **KEPT
    )
    run = ss.launch(job).wait(60)
    assert run.summary().test_loss is not None
    assert run.summary().test_accuracy is None


class Rows:
    """Random rows; those that are held out break in the way asked for."""

    def __init__(self, breaks: str | None) -> None:
        self.breaks = breaks

    def __len__(self) -> int:
        return 64

    def batch(self, indices: Tensor) -> tuple[Tensor, Tensor]:
        images = torch.randn(len(indices), 64, generator=torch.Generator().manual_seed(1))
        classes = torch.zeros(len(indices), dtype=torch.int64)
        is_broken = self.breaks == "raises" or self.breaks == f"rank {os.environ.get('RANK')}"
        if is_broken and len(indices) > 1:
            raise OSError("the test file has gone")
        return images, classes + 99 if self.breaks == "classes" else classes


@pytest.mark.slow
@pytest.mark.sampled
@pytest.mark.parametrize("breaks", ["raises", "classes"])
@pytest.mark.parametrize("strategy", ["ring", "zero-3"])
def test_held_out_data_that_fail_leave_the_trained_model_and_say_where(strategy: str, breaks: str) -> None:
    job = small_job(
        model=lambda: nn.Linear(64, 10), data=lambda: (Rows(None), Rows(breaks)), strategy=strategy, **KEPT
    )
    run = ss.launch(job)
    with pytest.raises(
        ss.RunFailed, match="the evaluation on the validation split after step 3 failed"
    ) as error:
        run.wait(60)
    first = str(error.value).splitlines()[0]
    assert f"the trained model is in {run.path / 'parameters.npz'}" in first
    assert ("OSError: the test file has gone" if breaks == "raises" else "IndexError: Target 99") in first
    assert "Traceback" in error.value.traceback
    assert set(np.load(run.path / "parameters.npz")["names"]) == {"weight", "bias"}
    longer = small_job(**{**job_fields(job), "steps": 4, "data": lambda: (Rows(None), Rows(None))})
    assert [event["step"] for event in ss.launch(longer, resume=run).wait(60).events("step", rank=0)] == [4]


def job_fields(job: ss.Job) -> dict[str, Any]:
    return {name: getattr(job, name) for name in ("model", "strategy", "world_size", "loss")}


def test_an_evaluation_on_the_way_fails_after_the_checkpoint_of_its_step() -> None:
    job = small_job(
        model=lambda: nn.Linear(64, 10), data=lambda: (Rows(None), Rows("raises")),
        eval_every=2, steps=6, checkpoint=ss.Checkpoint(every=2),
    )  # fmt: skip
    run = ss.launch(job)
    with pytest.raises(ss.RunFailed, match=r"after step 2 failed .*the trained model is in .*step-2"):
        run.wait(60)


@pytest.mark.sampled
@pytest.mark.parametrize("strategy", ["ring", "zero-3"])
@pytest.mark.parametrize("breaks", ["raises", "rank 1"])
def test_what_is_to_be_kept_at_the_end_is_kept_where_an_evaluation_on_the_way_fails(
    strategy: str, breaks: str
) -> None:
    job = small_job(
        model=lambda: nn.Linear(64, 10), data=lambda: (Rows(None), Rows(breaks)), strategy=strategy,
        eval_every=2, steps=6, checkpoint=ss.Checkpoint(at_end=True),
    )  # fmt: skip
    run = ss.launch(job)
    with pytest.raises(
        ss.RunFailed, match=r"step 2 failed \(OSError: the .*the trained model is in .*step-2"
    ) as error:
        run.wait(60)
    assert "set checkpoint" not in str(error.value)
    assert [path.name for path in (run.path / "checkpoints").iterdir()] == ["step-2"]


def test_a_job_that_keeps_nothing_is_told_how_to() -> None:
    job = small_job(
        model=lambda: nn.Linear(64, 10), data=lambda: (Rows(None), Rows("raises")), steps=2
    )  # fmt: skip
    with pytest.raises(
        ss.RunFailed, match=r"nothing was saved before it; set checkpoint=Checkpoint\(at_end=True\)"
    ):
        ss.launch(job).wait(60)
