"""The matrix on GPUs: NCCL with a GPU a rank, and gloo with staging where ranks share one. Needs a GPU."""

from __future__ import annotations

import pytest

import shardscope as ss
from conformance.runs import small_job

torch = pytest.importorskip("torch")
NUM_GPUS = torch.cuda.device_count()

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(NUM_GPUS == 0, reason="torch sees no GPU on this machine")]

OPTIMIZERS = ["sgd", "nesterov", "adamw", "lamb", "lars"]


def losses(job: ss.Job) -> list[float]:
    return list(ss.launch(job).wait(110).metrics()["loss"])


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("strategy", ["all-reduce", "ring"])
def test_ranks_sharing_a_gpu_follow_one_process(strategy: str, optimizer: str) -> None:
    world = NUM_GPUS + 1  # more ranks than GPUs
    batch = ss.Batch(8 * world, micro_size=4)
    job = small_job(device="cuda", strategy=strategy, world_size=world, batch=batch, optimizer=optimizer)
    run = ss.launch(job).wait(110)
    assert {event["backend"] for event in run.events("start")} == {"gloo (shared GPU, staged)"}
    alone = losses(job.replace(strategy="single", world_size=1))
    assert list(run.metrics()["loss"]) == pytest.approx(alone, rel=1e-5)


@pytest.mark.skipif(NUM_GPUS < 2, reason="needs two GPUs for NCCL between ranks")
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("strategy", ["all-reduce", "ring"])
def test_a_gpu_a_rank_follows_one_process_over_nccl(strategy: str, optimizer: str) -> None:
    job = small_job(device="cuda", strategy=strategy, world_size=2, optimizer=optimizer)
    run = ss.launch(job).wait(110)
    assert {event["backend"] for event in run.events("start")} == {
        "nccl"
    }  # the ring itself is staged through gloo
    assert list(run.metrics()["loss"]) == pytest.approx(
        losses(job.replace(strategy="single", world_size=1)), rel=1e-5
    )


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_mixed_precision_learns_on_a_gpu(precision: str) -> None:
    run = ss.launch(
        small_job(device="cuda", strategy="single", world_size=1, precision=precision, steps=40)
    ).wait(110)
    assert run.metrics()["loss"].iloc[-1] < 0.5 * run.metrics()["loss"].iloc[0]
    assert run.metrics()["max_memory_bytes"].max() > 0
