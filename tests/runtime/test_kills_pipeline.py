"""A pipeline whose stage dies, and pipelines that cannot be: one sentence each, and nothing left running."""

from __future__ import annotations

import os
import signal
from typing import Any

import pytest
import torch
from torch import nn

import shardscope as ss
from conformance.runs import all_gone, endless_job, family, rank_pids, small_job

pytestmark = pytest.mark.slow

BATCH = ss.Batch(48, micro_batch=4)


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("strategy", "victim", "role"),
    [("pipeline", 0, "stage 0"), ("pipeline:1f1b", 2, "stage 2"), ("pipeline:zbv", 1, "stages 1 and 4")],
)
def test_a_killed_stage_is_named(strategy: str, victim: int, role: str) -> None:
    model = "resnet" if "zbv" in strategy else "mlp"
    run = ss.launch(endless_job(strategy=strategy, model=model, world_size=3, batch=BATCH))
    pids = rank_pids(run)
    processes = family(run)
    os.kill(pids[victim], signal.SIGKILL)
    with pytest.raises(ss.RunFailed) as failed:
        run.wait(60)
    sentence = str(failed.value).splitlines()[0]
    assert f"rank {victim} ({role}) of strategy 'pipeline:" in sentence
    assert "was killed by SIGKILL" in sentence
    assert failed.value.rank == victim
    assert all_gone(processes)


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


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (
            {"batch": ss.Batch(48, micro_batch=24)},
            "batch.micro_batch=24 makes 2 micro-batches per pass, but the 1f1b schedule on 3 ranks needs",
        ),
        ({"batch": ss.Batch(48, micro_batch=24)}, "use batch.micro_batch=16 (3 micro-batches)"),
        ({"strategy": "pipeline:zb"}, "zero-bubble"),
        (
            {"strategy": "pipeline:dualpipev", "batch": ss.Batch(48, micro_batch=12), "model": "resnet"},
            "needs at least 6",
        ),
        (
            {"strategy": "pipeline:interleaved", "model": "resnet", "batch": ss.Batch(70, micro_batch=10)},
            "in rounds of equal size",
        ),
        (
            {"strategy": ss.Pipeline(microbatches=5)},
            "microbatches=5 does not divide the 12 micro-batches of a step",
        ),
        ({"strategy": ss.Pipeline(microbatches=2)}, "microbatches=2 makes 2 micro-batches per pass"),
        ({"world_size": 5}, "the model has 4 layers to split, fewer than the pipeline's 5 stages"),
        ({"strategy": "pipeline:zbv"}, "the model has 4 layers to split, fewer than the pipeline's 6 stages"),
        (
            {"strategy": ss.Pipeline(split=(2, 2))},
            "has 2 numbers, but world_size=3 with virtual_stages=1 makes 3 stages",
        ),
        ({"strategy": ss.Pipeline(split=(2, 0, 2))}, "give 3 numbers of at least 1"),
        (
            {"strategy": ss.Pipeline(split=(2, 2, 2))},
            "adds up to 6 layers, but model='mlp' has 4 layers; make",
        ),
    ],
)
def test_impossible_pipelines_are_refused_before_anything_starts(
    fields: dict[str, Any], message: str
) -> None:
    with pytest.raises(ss.SpecError) as refused:
        small_job(**{"strategy": "pipeline", "world_size": 3, "batch": BATCH, **fields})
    assert message in str(refused.value)
    assert "\n" not in str(refused.value)


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
