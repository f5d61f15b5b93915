"""The matrix on GPUs: NCCL with a GPU a rank, and gloo with staging where ranks share one. Needs a GPU."""

from __future__ import annotations

import pytest

import shardscope as ss
from conformance.runs import small_job
from shardscope.spec.strategy import strategies

torch = pytest.importorskip("torch")
NUM_GPUS = torch.cuda.device_count()

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(NUM_GPUS == 0, reason="torch sees no GPU on this machine")]

OPTIMIZERS = ["sgd", "nesterov", "adamw", "lamb", "lars"]
SYNCHRONOUS = [kind for kind in strategies() if kind not in ("single", "gossip")]


def losses(job: ss.Job) -> list[float]:
    return list(ss.launch(job).wait(110).metrics()["loss"])


def follows_one_process(run: ss.Run) -> None:
    alone = losses(run.job.replace(strategy="single", world_size=1, batch=run.job.batch.global_batch))
    assert list(run.wait(110).metrics()["loss"]) == pytest.approx(alone, rel=1e-5)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("strategy", SYNCHRONOUS)
def test_ranks_sharing_a_gpu_follow_one_process(strategy: str, optimizer: str) -> None:
    world = 2 * max(NUM_GPUS, 2)  # more ranks than GPUs
    run = ss.launch(
        small_job(device="cuda", strategy=strategy, world_size=world, batch=12 * world, optimizer=optimizer)
    )
    follows_one_process(run)
    assert {event["backend"] for event in run.events("start")} == {"gloo (shared GPU)"}


@pytest.mark.skipif(NUM_GPUS < 2, reason="needs two GPUs for NCCL between ranks")
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("strategy", [kind for kind in SYNCHRONOUS if kind != "hierarchical"])
def test_a_gpu_a_rank_follows_one_process_over_nccl(strategy: str, optimizer: str) -> None:
    run = ss.launch(small_job(device="cuda", strategy=strategy, world_size=2, optimizer=optimizer))
    follows_one_process(run)
    assert {event["backend"] for event in run.events("start")} == {
        "nccl"
    }  # our own messages are staged through gloo


@pytest.mark.skipif(NUM_GPUS < 2, reason="needs two GPUs for NCCL between ranks")
@pytest.mark.parametrize("strategy", [ss.Zero2(collectives="backend"), ss.Zero3(collectives="backend")])
def test_stock_fsdp_follows_one_process_over_nccl(strategy: ss.Zero2 | ss.Zero3) -> None:
    follows_one_process(ss.launch(small_job(device="cuda", strategy=strategy, world_size=2)))


@pytest.mark.parametrize("precision", ["fp32", "bf16-mixed"])
@pytest.mark.parametrize("optimizer", ["adamw", "lamb"])
def test_the_peak_on_a_gpu_is_the_predicted_one(optimizer: str, precision: str) -> None:
    job = ss.Job(
        model="gpt-small", data="python-source", strategy="single", batch=32, steps=4, precision=precision,
        device="cuda", optimizer=optimizer,
    )  # fmt: skip
    predicted = ss.predict(job, ss.Cluster.of("h100", nodes=1, per_node=1)).peak_bytes
    peak = max(event["peak_memory_bytes"] for event in ss.launch(job).wait(110).events("step"))
    assert peak == pytest.approx(predicted, rel=0.02, abs=4 * 2**20)


@pytest.mark.parametrize("precision", ["bf16-mixed", "fp16-mixed"])
def test_mixed_precision_learns_on_a_gpu(precision: str) -> None:
    run = ss.launch(
        small_job(device="cuda", strategy="single", world_size=1, precision=precision, steps=40)
    ).wait(110)
    assert run.metrics()["loss"].iloc[-1] < 0.5 * run.metrics()["loss"].iloc[0]
    assert run.metrics()["process_bytes"].max() > 0
