"""Peak memory of the ranks of pipelines whose stages are sharded with ZeRO, as in test_stages.py."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from pathlib import Path

import pytest
import torch
from torch import nn

import shardscope as ss
from conformance.ranks import RankPool
from conformance.stage_peaks import measured
from shardscope.analytic.memory.sharded_stages import ShardedStages, states_of
from shardscope.spec.model.step import ParameterRow, PipelinePiece, StepTrace
from shardscope.spec.models import GPTConfig
from shardscope.training.models import build_model

CASES = [*product(
    ("none", "selective", "full"),
    ("1f1b", "gpipe", "interleaved", "zb-h1", "zbv"),
    ("zero-1", "zero-2", "zero-3"),
)]  # fmt: skip

MESSAGE = 4 * 64 * 128 * 4
"""Bytes of what a stage hands on for a micro-batch."""
SPARE = {"zb-h1": 3, "zbv": 6}
"""Most messages by which ranks need less than predicted; none in other schedules."""


@pytest.fixture(scope="module")
def four() -> Iterator[RankPool]:
    ranks = RankPool(4)
    yield ranks
    ranks.close()


@pytest.fixture(scope="module")
def four_by_tcp() -> Iterator[RankPool]:
    """Ranks that send parameters and gradients in messages, instead of sharing buffers."""
    ranks = RankPool(4, transport="tcp")
    yield ranks
    ranks.close()


@pytest.fixture(scope="module")
def eight() -> Iterator[RankPool]:
    ranks = RankPool(8)
    yield ranks
    ranks.close()


def gpt() -> nn.Module:
    """Eight layers, of which the first only embeds its input."""
    return build_model(GPTConfig(layers=6, hidden=128, heads=4, vocab=256, seq=64, ffn=512))


def hold(
    pool: RankPool, folder: Path, data: str, schedule: str, recompute: str, tensor: int = 1, **fields: str
) -> None:
    """Assert that each rank needs what is predicted, within one percent and the few messages of `SPARE`.

    The measured peaks of ranks with equal work, and of a rank in two runs, have differed by one to three messages; the
    cause has not been traced. Random states of recomputed layers are not predicted.
    """
    stages = ss.Pipeline(schedule=schedule, split="even")
    pipeline = pool.world_size // 2 // tensor
    job = ss.Job(
        model=gpt, data="python-source", world_size=pool.world_size, device="cpu", optimizer="sgd",
        recompute=recompute, record=ss.Record(messages_first=0), batch=ss.Batch(16 * pipeline, micro_batch=4),
        strategy=ss.Strategy("mesh", data=data, tensor=tensor, pipeline=pipeline, stages=stages), **fields,
    )  # fmt: skip
    peaks, terms = pool.run(measured(job), folder), ss.predict(job).by_rank
    assert terms is not None
    low = 0.999 if recompute == "none" else 0.984
    spare = MESSAGE * SPARE.get(schedule, 0)
    for term, peak in zip(terms, peaks, strict=True):
        assert low * peak < term.value < 1.001 * peak + spare


@pytest.mark.sampled
@pytest.mark.parametrize(("recompute", "schedule", "data"), CASES)
def test_ranks_of_sharded_stages_need_what_is_predicted(
    four: RankPool, tmp_path: Path, recompute: str, schedule: str, data: str
) -> None:
    hold(four, tmp_path, data, schedule, recompute)


@pytest.mark.sampled
@pytest.mark.parametrize("schedule", ["1f1b", "zbv"])
@pytest.mark.parametrize("data", ["zero-3", "zero-2"])
def test_messages_of_sharded_stages_need_what_is_predicted(
    four_by_tcp: RankPool, tmp_path: Path, data: str, schedule: str
) -> None:
    hold(four_by_tcp, tmp_path, data, schedule, "none", transport="tcp")


def odd_gpt() -> nn.Module:
    """Its embedding and head have 257 rows, which two ranks cannot share equally."""
    return build_model(GPTConfig(layers=2, hidden=64, heads=4, vocab=257, seq=16, ffn=128))


def test_reductions_of_padded_gradients_need_what_is_predicted(four: RankPool, tmp_path: Path) -> None:
    job = ss.Job(
        model=odd_gpt, data="python-source", world_size=4, device="cpu", optimizer="sgd",
        record=ss.Record(messages_first=0), batch=ss.Batch(4, micro_batch=1),
        strategy=ss.Strategy("mesh", data="zero-2", pipeline=2, stages=ss.Pipeline(schedule="1f1b", split="even")),
    )  # fmt: skip
    peaks, terms = four.run(measured(job), tmp_path), ss.predict(job).by_rank
    assert terms is not None
    for term, peak in zip(terms, peaks, strict=True):
        assert 0.99 < term.value / peak < 1.01


class _Wide(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(256, 1024), nn.Linear(1024, 256)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(nn.functional.gelu(self.up(x)))  # type: ignore[no-any-return]


def wide() -> nn.Module:
    """Its parameters take more memory than its activations."""
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 256), *(_Wide() for _ in range(4)), nn.Linear(256, 10))


@pytest.mark.sampled
@pytest.mark.parametrize("bucket_mb", [1.0, 25.0])
@pytest.mark.parametrize("data", [ss.Ring, ss.AllReduce])
def test_exchanges_after_the_passes_need_a_copy_of_a_bucket(
    four: RankPool, tmp_path: Path, data: type[ss.Ring | ss.AllReduce], bucket_mb: float
) -> None:
    stages = ss.Pipeline(schedule="1f1b", split="even")
    job = ss.Job(
        model=wide, data="digits", world_size=4, device="cpu", optimizer="sgd",
        record=ss.Record(messages_first=0), batch=ss.Batch(512, micro_batch=32),
        strategy=ss.Strategy("mesh", data=data(bucket_mb=bucket_mb), pipeline=2, stages=stages),
    )  # fmt: skip
    peaks, terms = four.run(measured(job), tmp_path), ss.predict(job).by_rank
    assert terms is not None
    for term, peak in zip(terms, peaks, strict=True):
        assert 0.985 < term.value / peak < 1.01


def test_reductions_leave_larger_shards_of_experts() -> None:
    rows = [ParameterRow(unit=1, shape=(8, 10), is_expert=True), ParameterRow(unit=2, shape=(9, 20))]
    pieces = [PipelinePiece(output_bytes=0, flops=0, stored_bytes=0, parameters=(place,)) for place in (0, 1)]
    trace = StepTrace(
        units=("", "0", "1"), parameters=tuple(rows), pieces=tuple(pieces), buffer_bytes=0, output_bytes=0, moments={}
    )  # fmt: skip
    states = states_of(trace, pieces, (), ShardedStages(2, 4, expert_ranks=2), element_bytes=1)
    message = copy = 12 * 20  # nine rows, padded for four ranks
    assert states.reduction(has_gradients=False, frees=False) == (0, 8 * 10 / 2 + 9 * 20 + message + copy)


@pytest.mark.weekly
@pytest.mark.parametrize(("recompute", "schedule", "data"), CASES)
def test_ranks_in_the_middle_of_a_pipeline_need_what_is_predicted(
    eight: RankPool, tmp_path: Path, recompute: str, schedule: str, data: str
) -> None:
    hold(eight, tmp_path, data, schedule, recompute)


@pytest.mark.weekly
@pytest.mark.parametrize("data", ["zero-1", "zero-2", "zero-3"])
def test_sharded_stages_of_divided_layers_need_what_is_predicted(
    eight: RankPool, tmp_path: Path, data: str
) -> None:
    hold(eight, tmp_path, data, "1f1b", "none", tensor=2)
