"""Peak memory of jobs on GPUs: predictions beside measured ones, and what autocast does on GPUs alone."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import shardscope as ss
from shardscope.analytic.layouts import Layouts
from shardscope.analytic.memory import FRAMEWORKS, device_memory
from shardscope.prediction.job import predict_job
from shardscope.prediction.traced import traced
from shardscope.spec.models import MODELS, GPTConfig
from shardscope.training.cuda_casts import CudaCasts
from shardscope.training.models.gpt import GPT

MIB = 2**20
SIZES = {
    "nano": MODELS["gpt-nano"],
    "small": MODELS["gpt-small"],
    "124M": GPTConfig(layers=12, hidden=768, heads=12, vocab=50304, seq=1024),
    "350M": GPTConfig(layers=24, hidden=1024, heads=16, vocab=50304, seq=1024),
    "760M": GPTConfig(layers=24, hidden=1536, heads=16, vocab=50304, seq=1024),
    "1.3B": GPTConfig(layers=24, hidden=2048, heads=16, vocab=50304, seq=1024),
}
MEASURED = (
    ("nano", "fp32", 16, "none", 91_407_576),
    ("nano", "bf16-mixed", 256, "none", 272_950_560),
    ("small", "fp32", 32, "none", 1_609_322_148),
    ("small", "bf16-mixed", 32, "none", 1_047_025_984),
    ("124M", "fp32", 4, "none", 6_478_748_248),
    ("124M", "bf16-mixed", 16, "selective", 13_984_946_784),
    ("760M", "bf16-mixed", 8, "full", 15_269_336_216),
)
"""Model, precision, micro-batch, recomputation, and the bytes that tensors took at the peak of a step with AdamW on an
H100 (torch 2.11, ``requested_bytes.all.peak``), by tests/benchmarks/memory_gpu.py. The peaks of gpt-small are in the
sum of a bias's gradient, the last peak is in the forward pass, where autocast keeps all weights that it has cast."""
ALLOCATED = (
    ("124M", "bf16-mixed", 16, "none", 1, 15_580_444_672),
    ("124M", "bf16-mixed", 16, "full", 1, 10_567_714_816),
    ("350M", "bf16-mixed", 1, "none", 1, 6_463_164_416),
    ("350M", "bf16-mixed", 16, "none", 1, 27_903_897_600),
    ("350M", "bf16-mixed", 4, "none", 1, 10_754_142_208),
    ("350M", "bf16-mixed", 4, "none", 4, 12_172_776_448),
    ("350M", "bf16-mixed", 8, "full", 1, 9_407_582_208),
    ("350M", "fp32", 4, "none", 1, 13_283_281_920),
    ("350M", "fp32", 4, "full", 1, 7_237_716_992),
    ("760M", "bf16-mixed", 4, "none", 1, 18_297_692_160),
    ("760M", "bf16-mixed", 8, "full", 1, 15_313_525_760),
    ("1.3B", "bf16-mixed", 4, "none", 1, 27_825_672_192),
    ("1.3B", "bf16-mixed", 16, "full", 1, 28_475_370_496),
)
"""The same of other trainings, with the number of micro-batches and the bytes allocated at the peak."""
BF16_LOGITS = {"logits_bytes": 10, "logits_later": 2}
"""Bytes of a logit in bf16-mixed, and those of its gradient alone (tests/benchmarks/memory_gpu.py)."""
LEAST = (
    ("124M", "fp32", 16, "none", 23_557_308_416),
    ("124M", "bf16-mixed", 16, "selective", 16_583_308_032),
    ("350M", "bf16-mixed", 8, "full", 11_196_926_464),
)
"""The same, and the smallest limit of the allocator with which the training ran."""
SMALL_WORKSPACES = 3 * MIB
"""What cuBLAS and kernels take beside the workspaces that are predicted."""


def make_data(size: str) -> tuple[object, object]:
    rows = torch.zeros(256, SIZES[size].seq, dtype=torch.int64)
    return (rows, rows), (rows[:1], rows[:1])


def make_model(size: str) -> nn.Module:
    return GPT(SIZES[size])


H100 = ss.Cluster.of("h100", nodes=1, per_node=1)


def job_of(size: str, precision: str, batch: int, recompute: str) -> ss.Job:
    return ss.Job(
        model=partial(make_model, size), data=partial(make_data, size), strategy="single", batch=batch,
        precision=precision, recompute=recompute, loss="cross-entropy",
    )  # fmt: skip


@pytest.mark.parametrize(("size", "precision", "batch", "recompute", "measured"), MEASURED)
def test_the_peak_is_that_of_a_gpu(
    size: str, precision: str, batch: int, recompute: str, measured: int
) -> None:
    peak = ss.predict(job_of(size, precision, batch, recompute), H100).peak_bytes
    assert peak == pytest.approx(measured, rel=1e-4, abs=SMALL_WORKSPACES)


@pytest.mark.parametrize(("size", "precision", "batch", "recompute", "count", "allocated"), ALLOCATED)
def test_the_formulas_for_layouts_give_the_peak_of_a_gpu(
    size: str, precision: str, batch: int, recompute: str, count: int, allocated: int
) -> None:
    layout = ss.Layout.model_validate(
        {"micro_batch": batch, "global_batch": batch * count, "recompute": recompute, "precision": precision}
    )
    software = FRAMEWORKS["fsdp2"]
    if precision == "bf16-mixed":
        software = software._replace(**BF16_LOGITS)
    held = device_memory(SIZES[size].transformer(size), Layouts.of([layout]), framework=software)
    assert float(held.total[0]) == pytest.approx(allocated, rel=0.035)


@pytest.mark.slow
@pytest.mark.parametrize(("size", "precision", "batch", "recompute", "least"), LEAST)
def test_what_the_allocator_needs_is_about_the_least_with_which_a_gpu_trains(
    size: str, precision: str, batch: int, recompute: str, least: int
) -> None:
    job = job_of(size, precision, batch, recompute)
    found = traced(job.replace(device="cuda"))  # once: each prediction would trace a model of one's own again
    for factor, fits in ((0.94, False), (1.06, True)):
        memory = H100.device.context_bytes + factor * least
        cluster = H100.replace(device=H100.device.replace(memory_bytes=memory))
        assert predict_job(job, cluster, trace=lambda _: found).fits is fits


def test_workspaces_are_part_of_the_memory_of_gpus_alone() -> None:
    job = ss.Job(model="mlp", data="digits", strategy="ring", world_size=2, batch=64)
    for cluster in (
        ss.Cluster.of("a100-80gb", nodes=1, per_node=2),
        ss.Cluster.of("cpu", nodes=1, per_node=2),
        None,
    ):
        memory = ss.predict(job.replace(device="cpu") if cluster is None else job, cluster).memory
        assert memory is not None
        found = {part.name: part.value for part in memory.parts}
        is_on_gpus = cluster is not None and cluster.device.name != "cpu"
        assert found.get("workspace", 0.0) == (2 * 8.125 * 2**20 if is_on_gpus else 0.0)


def test_a_cross_entropy_keeps_16_bit_log_probabilities_as_on_gpus() -> None:
    scores = torch.randn(6, 5, dtype=torch.bfloat16, requires_grad=True)
    target = torch.tensor([0, 1, 2, 3, 4, -100])
    weight = torch.rand(5)
    whole = functional.cross_entropy(scores.float(), target, weight)
    with CudaCasts(), torch.autocast("cpu", torch.bfloat16):
        loss = functional.cross_entropy(scores, target, weight=weight)
        smoothed = functional.cross_entropy(scores, target, label_smoothing=0.1)
    assert loss.item() == pytest.approx(whole.item(), rel=1e-2)
    assert loss.item() != whole.item()  # rounded to bfloat16
    assert smoothed.dtype == torch.float32
    assert loss.grad_fn.next_functions[0][0].name() == "ToCopyBackward0"  # type: ignore[union-attr]
    loss.backward()
    assert scores.grad is not None and scores.grad[-1].eq(0).all()


def loss_in_checkpoint(scores: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    found: torch.Tensor = checkpoint(functional.cross_entropy, scores, target, use_reentrant=False)
    return found


@pytest.mark.parametrize("loss", ["cross-entropy", loss_in_checkpoint])
def test_a_trace_for_gpus_keeps_less_for_the_loss_unless_it_is_in_a_checkpoint(loss: Any) -> None:
    """A checkpoint refuses tensors of another dtype than in the forward pass, so there it is as on CPUs."""
    job = ss.Job(model="mlp", data="digits", strategy="single", batch=64, precision="bf16-mixed", loss=loss)
    kept = {}
    for device in ("cpu", "cuda"):
        step = traced(job.replace(device=device)).table.step
        assert step is not None
        kept[device] = max(moment.activations for moment in step.moments["none"] if moment.phase == "loss")
    logits = 10
    less = kept["cpu"] - kept["cuda"]
    assert less == pytest.approx(2 * logits if loss == "cross-entropy" else 0, abs=0.5)
