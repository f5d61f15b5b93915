"""Sequences divided over context ranks in each stage of a pipeline: the stages follow one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import shardscope as ss
from conformance.changing import refusals
from conformance.one_process import follow, hold_evaluation, hold_losses
from conformance.ranks import RankPool
from conformance.strategy import job
from shardscope.spec.models import GPTConfig
from shardscope.training.models import build_model

COMMS = ("all-gather", "ring", "ulysses")
SCHEDULES = (
    "1f1b", "dualpipev", "gpipe", "interleaved", "v-half", "v-min", "zb-h1", "zb-h2", "zbv", "zero-bubble"
)  # fmt: skip


def mesh(comm: str = "all-gather", schedule: str = "1f1b", **settings: Any) -> ss.Strategy:
    stages = ss.Pipeline(schedule=schedule)
    return ss.Strategy(
        "mesh", **{"pipeline": 2, "context": 2, "context_comm": comm, "stages": stages, **settings}
    )


def deeper_gpt() -> nn.Module:
    """Five layers, enough for two stages on each of two ranks; its heads are enough for two axes."""
    return build_model(GPTConfig(layers=3, hidden=16, heads=4, vocab=256, seq=16, ffn=32))


@pytest.mark.slow
@pytest.mark.ranks(4)
def test_stages_follow_one_process(pool: RankPool, tmp_path: Path) -> None:
    strategy = mesh("ring", "zb-h1", data=ss.Ring(bucket_mb=0.02))
    follow(pool, tmp_path, strategy, deeper_gpt, recompute="full", micro_batch=12)


@pytest.mark.weekly
@pytest.mark.ranks(4)
@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
@pytest.mark.parametrize(
    ("precision", "optimizer"), [("fp64", "lars"), ("fp32", "adamw"), ("bf16-mixed", "adamw")]
)
@pytest.mark.parametrize("comm", COMMS)
def test_each_way_to_communicate_follows_one_process(
    pool: RankPool, tmp_path: Path, comm: str, precision: str, optimizer: str, recompute: str
) -> None:
    changes = {"precision": precision, "optimizer": optimizer, "recompute": recompute}
    follow(pool, tmp_path, mesh(comm), deeper_gpt, **changes)


@pytest.mark.weekly
@pytest.mark.ranks(4)
@pytest.mark.parametrize("data", ["ring", ss.Zero1(bucket_mb=0.02), ss.Zero2(), ss.Zero3()])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_every_schedule_follows_one_process(pool: RankPool, tmp_path: Path, schedule: str, data: Any) -> None:
    follow(pool, tmp_path, mesh("ring", schedule, data=data), deeper_gpt, recompute="full")


class Rotary(nn.Module):
    """A block that turns queries and keys by the positions of their tokens, which it counts itself."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.mix = nn.Linear(16, 48), nn.Linear(16, 16)
        self.register_buffer("rates", 100 ** -torch.linspace(0, 1, 2), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, -1, 4)).permute(2, 0, 3, 1, 4)
        angles = torch.arange(x.shape[1], device=x.device)[:, None] * self.rates
        turn = torch.polar(torch.ones_like(angles), angles)
        q, k = (
            torch.view_as_real(torch.view_as_complex(each.unflatten(-1, (2, 2))) * turn).flatten(-2)
            for each in (q, k)
        )
        heads = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        mixed: Tensor = x + self.mix(heads.transpose(1, 2).flatten(2))
        return mixed


def rotary_stack() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Embedding(256, 16), *(Rotary() for _ in range(3)), nn.Linear(16, 256))


def tokens() -> tuple[Any, Any]:
    """Sequences of 16 tokens, of which the early ones of every second sequence have no target."""
    draw = torch.Generator().manual_seed(0)
    text = torch.randint(256, (96, 17), generator=draw)
    targets = text[:, 1:].clone()
    targets[::2, :6] = -100
    found = torch.utils.data.TensorDataset(text[:, :-1], targets)
    return found, found


@pytest.mark.ranks(4)
@pytest.mark.parametrize(
    "comm", ["all-gather", *(pytest.param(comm, marks=pytest.mark.weekly) for comm in COMMS[1:])]
)
def test_positions_in_later_stages_and_uneven_targets_are_those_of_whole_sequences(
    pool: RankPool, tmp_path: Path, comm: str
) -> None:
    fields: dict[str, Any] = {
        "model": rotary_stack,
        "data": tokens,
        "steps": 4,
        "clip_norm": 0.5,
        "loss": "cross-entropy",
    }
    ours = job(strategy=mesh(comm), world_size=4, batch=ss.Batch(48, micro_batch=6), **fields)
    hold_losses(pool, tmp_path, ours)


@pytest.mark.ranks(4)
@pytest.mark.parametrize("changes_targets", [True, False])
def test_ranks_that_read_different_sequences_are_refused(
    pool: RankPool, tmp_path: Path, changes_targets: bool
) -> None:
    told = "the ranks of a context group have read different batches"
    refused = refusals(pool, tmp_path, mesh(), changes_targets=changes_targets)
    assert all(told in refusal for refusal in refused)


@pytest.mark.slow
@pytest.mark.ranks(4)
def test_an_evaluation_counts_each_token_once(pool: RankPool, tmp_path: Path) -> None:
    ours = job(strategy=mesh("ring"), world_size=4, batch=ss.Batch(48, micro_batch=6))
    hold_evaluation(pool, tmp_path, ours)


# Eight ranks.


@pytest.mark.weekly
@pytest.mark.parametrize("comm", COMMS)
@pytest.mark.parametrize(
    "settings",
    [
        {"data": "ring"},
        {"data": "ring", "context": 4},
        {"data": ss.Zero1(bucket_mb=0.02)},
        {"data": ss.Zero3()},
        {"tensor": 2},
        {"tensor": 2, "sequence_parallel": True},
        {"tensor": 2, "data": ss.Zero2()},
        {"tensor": 2, "stages": ss.Pipeline(schedule="zbv")},
        {"stages": ss.Pipeline(schedule="interleaved")},
    ],
    ids=str,
)
@pytest.mark.parametrize("precision", ["fp64", "fp32"])
def test_three_axes_follow_one_process(
    eight: RankPool, tmp_path: Path, settings: dict[str, Any], comm: str, precision: str
) -> None:
    follow(eight, tmp_path, mesh(comm, **settings), deeper_gpt, precision=precision, recompute="selective")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("comm", "settings"),
    [("all-gather", {"data": ss.Zero1(bucket_mb=0.02)}), ("ring", {"tensor": 2, "sequence_parallel": True})],
    ids=str,
)
def test_two_triples_follow_one_process(
    eight: RankPool, tmp_path: Path, comm: str, settings: dict[str, Any]
) -> None:
    micro_batch = 12 if "tensor" in settings else 6
    follow(eight, tmp_path, mesh(comm, **settings), deeper_gpt, micro_batch=micro_batch)
