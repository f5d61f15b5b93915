"""Stages of a pipeline that fail, models that cannot be cut into stages, and pipelines that resume."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
from torch import nn

import shardscope as ss
from conformance.runs import small_job

pytestmark = pytest.mark.slow

BATCH = ss.Batch(48, micro_batch=4)


def test_a_layer_that_raises_is_named_with_its_own_error() -> None:
    def make_model() -> nn.Module:
        class Raises(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.layer = nn.Linear(32, 10)
                self.calls = 0

            def forward(self, x: torch.Tensor) -> torch.Tensor:
                self.calls += 1
                if self.calls > 20 and os.environ["RANK"] == "1":
                    raise KeyError("no such layer")
                return self.layer(x)

        return nn.Sequential(nn.Flatten(), nn.Linear(64, 32), nn.ReLU(), Raises())

    run = ss.launch(small_job(model=make_model, strategy=ss.Pipeline(split=(2, 2)), batch=BATCH))
    with pytest.raises(
        ss.RunFailed, match=r"rank 1 \(stage 1\) .* failed at step 2: KeyError: 'no such layer'"
    ):
        run.wait(60)


def failure(model: Any, **fields: Any) -> str:
    run = ss.launch(small_job(model=model, batch=BATCH, **{"strategy": "pipeline", **fields}))
    with pytest.raises(ss.RunFailed) as error:
        run.wait(60)
    assert error.value.traceback == ""
    return str(error.value)


def test_a_model_of_the_users_with_too_few_layers_is_refused() -> None:
    message = failure(lambda: nn.Sequential(nn.Flatten(), nn.Linear(64, 10)), world_size=3)
    assert "the model has 2 layers to split, fewer than the pipeline's 3 stages" in message


def test_a_cut_by_hand_that_does_not_add_up_is_refused() -> None:
    message = failure(
        lambda: nn.Sequential(nn.Flatten(), nn.Linear(64, 10)), strategy=ss.Pipeline(split=(2, 1))
    )
    assert "split=(2, 1) adds up to 3 layers, but a model of type Sequential has 2 layers; make" in message


def test_a_model_that_cannot_be_cut_is_refused() -> None:
    assert "cannot be split into stages; give an nn.Sequential" in failure(lambda: nn.Linear(64, 10))


def test_a_run_goes_on_from_its_checkpoint_as_if_it_had_not_stopped() -> None:
    def fields(steps: int, **more: Any) -> ss.Job:
        return small_job(
            model="resnet", strategy="pipeline:interleaved", optimizer="lamb", batch=BATCH, steps=steps,
            checkpoint=ss.Checkpoint(at_end=True), **more,
        )  # fmt: skip

    whole = ss.launch(fields(6)).wait(60)
    half = ss.launch(fields(3)).wait(60)
    rest = ss.launch(fields(6), resume=half).wait(60)
    losses = whole.metrics()["loss"].tolist()
    assert rest.metrics()["loss"].tolist() == pytest.approx(losses[3:], rel=1e-5)
    alone = ss.launch(
        small_job(model="resnet", strategy="single", world_size=1, optimizer="lamb", batch=BATCH, steps=6),
        resume=half,
    ).wait(60)
    assert alone.metrics()["loss"].tolist() == pytest.approx(losses[3:], rel=1e-3)
    assert whole.summary().test_loss is not None


def test_a_stage_without_parameters_is_saved_and_resumed_with_the_others() -> None:
    def fields(steps: int) -> ss.Job:
        return small_job(
            model=lambda: nn.Sequential(nn.Flatten(), nn.Linear(64, 10)), strategy=ss.Pipeline(split=(1, 1)),
            optimizer=ss.Optimizer("lamb", max_grad_norm=0.1), batch=BATCH, steps=steps,
            checkpoint=ss.Checkpoint(at_end=True),
        )  # fmt: skip

    whole = ss.launch(fields(6)).wait(60)
    rest = ss.launch(fields(6), resume=ss.launch(fields(3)).wait(60)).wait(60)
    assert rest.metrics()["loss"].tolist() == pytest.approx(whole.metrics()["loss"].tolist()[3:], rel=1e-5)
