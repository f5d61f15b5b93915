"""Peak memory of a pipeline's ranks, predicted from the trace of the whole model, against torch's own allocator."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch import nn

import shardscope as ss
from conformance.ranks import RankPool
from conformance.stage_peaks import measured
from shardscope.spec.models import GPTConfig
from shardscope.training.models import build_model

SPLITS = {
    "gpipe": (3, 3),
    "1f1b": (3, 3),
    "zb-h1": (3, 3),
    "interleaved": (2, 1, 1, 2),
    "zero-bubble": (2, 1, 1, 2),
}
CASES = [
    (schedule, precision, recompute)
    for recompute in ("none", "full", "selective")
    for schedule in SPLITS
    for precision in ("fp32", "bf16-mixed")
]


@pytest.fixture(scope="module")
def two() -> Iterator[RankPool]:
    ranks = RankPool(2)
    yield ranks
    ranks.close()


@pytest.mark.sampled
@pytest.mark.parametrize(("schedule", "precision", "recompute"), CASES)
def test_the_ranks_of_a_pipeline_need_what_is_predicted(
    two: RankPool, tmp_path: Path, schedule: str, precision: str, recompute: str
) -> None:
    split = SPLITS[schedule]
    job = ss.Job(
        model="gpt-mini", data="python-source", world_size=2, device="cpu", optimizer="sgd", precision=precision,
        recompute=recompute, batch=ss.Batch(16, micro_batch=2),
        strategy=ss.Pipeline(schedule=schedule, split=split, virtual_stages=len(split) // 2),
    )  # fmt: skip
    is_split = ss.PipelineSchedule(schedule).splits_backward
    low, high = (0.985, 1.09) if is_split and recompute == "full" else (0.985, 1.035)
    peaks = two.run(measured(job), tmp_path)
    terms = ss.predict(job).by_rank
    assert terms is not None
    for term, peak in zip(terms, peaks, strict=True):
        assert low < term.value / peak < high


def stack() -> nn.Sequential:
    """A model whose output is that of its last layer, without any operation between layers and loss."""
    first = nn.Sequential(nn.Flatten(), nn.Linear(64, 192))
    return nn.Sequential(first, *(nn.Linear(192, 192) for _ in range(5)))


def test_a_stack_of_layers_needs_what_is_predicted(two: RankPool, tmp_path: Path) -> None:
    job = ss.Job(
        model=stack, data="digits", world_size=2, device="cpu", optimizer="sgd",
        batch=ss.Batch(512, micro_batch=64), strategy=ss.Pipeline(schedule="1f1b", split="even"),
    )  # fmt: skip
    peaks = two.run(measured(job), tmp_path)
    terms = ss.predict(job).by_rank
    assert terms is not None
    for term, peak in zip(terms, peaks, strict=True):
        assert 0.985 < term.value / peak < 1.035


def alternating() -> nn.Sequential:
    """A model with layers without parameters, one of which saves its own output."""
    layers = [
        nn.Linear(64, 256),
        nn.ReLU(),
        nn.Dropout(0.1),
        nn.Linear(256, 256),
        nn.ReLU(),
        nn.Linear(256, 10),
    ]
    return nn.Sequential(nn.Flatten(), *layers)


class Tied(nn.Module):
    """A linear layer and a ReLU, whose weight other layers may use too."""

    def __init__(self, weight: nn.Parameter) -> None:
        super().__init__()
        self.weight, self.bias = weight, nn.Parameter(torch.zeros(256))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(nn.functional.linear(x, self.weight, self.bias))


def tied() -> nn.Sequential:
    """A model with two layers in the middle that share a weight."""
    first, shared, *others = (nn.Parameter(torch.randn(256, size) / 16) for size in (64, 256, 256, 256))
    inner = (Tied(weight) for weight in (shared, *others, shared))
    return nn.Sequential(nn.Flatten(), Tied(first), *inner, nn.Linear(256, 10))


def half_frozen() -> nn.Module:
    """A model whose lower half is frozen, such as one that is fine-tuned."""
    model = build_model(GPTConfig(layers=6, hidden=128, heads=4, vocab=256, seq=64, ffn=512))
    parameters = [*model.parameters()]
    for parameter in parameters[: len(parameters) // 2]:
        parameter.requires_grad_(False)
    return model


ODD = [
    (alternating, "1f1b", (3, 4)),  # a stage begins between two layers without parameters
    (alternating, "1f1b", (5, 2)),
    (alternating, "zb-h1", (4, 3)),
    (tied, "1f1b", (4, 3)),
    (half_frozen, "1f1b", (4, 4)),
    (half_frozen, "zbv", (2, 2, 2, 2)),
]


@pytest.mark.parametrize(("model", "schedule", "split"), ODD)
def test_stages_of_odd_layers_need_what_is_predicted(
    two: RankPool, tmp_path: Path, model: Callable[[], nn.Module], schedule: str, split: tuple[int, ...]
) -> None:
    data = "python-source" if model is half_frozen else "digits"
    job = ss.Job(
        model=model, data=data, world_size=2, device="cpu", optimizer="sgd",
        batch=ss.Batch(32, micro_batch=4) if model is half_frozen else ss.Batch(512, micro_batch=64),
        strategy=ss.Pipeline(schedule=schedule, split=split, virtual_stages=len(split) // 2),
    )  # fmt: skip
    peaks = two.run(measured(job), tmp_path)
    terms = ss.predict(job).by_rank
    assert terms is not None
    for term, peak in zip(terms, peaks, strict=True):
        assert 0.99 < term.value / peak < 1.035


def test_a_stage_whose_layers_share_a_weight_is_not_split() -> None:
    job = ss.Job(
        model=tied, data="digits", world_size=2, batch=ss.Batch(512, micro_batch=64),
        strategy=ss.Pipeline(schedule="zb-h1", split=(1, 6)),
    )  # fmt: skip
    with pytest.raises(
        ss.SpecError, match="that of stage 2 of 2 \\(several of its layers share a weight\\); use"
    ):
        _ = ss.predict(job).by_rank


class Cut(nn.Linear):
    """A layer that no gradient flows through."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x.detach())


def test_stages_are_not_predicted_if_no_gradient_flows_through_a_layer() -> None:
    job = ss.Job(
        model=lambda: nn.Sequential(nn.Flatten(), nn.Linear(64, 64), Cut(64, 64), nn.Linear(64, 10)),
        data="digits", world_size=2, device="cpu", batch=ss.Batch(64, micro_batch=8),
        strategy=ss.Pipeline(schedule="1f1b", split=(2, 2)),
    )  # fmt: skip
    found = ss.predict(job)
    assert found.by_rank is found.peak_bytes is None
    assert found.step_time_s is not None
    assert "peak memory per rank: unknown" in str(found)
