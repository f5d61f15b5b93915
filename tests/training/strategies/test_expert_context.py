"""Parts of sequences whose tokens go to experts: capacity and balance loss stay those of whole sequences."""

from __future__ import annotations

from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import shardscope as ss
from conformance.alone import context_for
from conformance.one_process import follow, mixed
from conformance.ranks import RankPool
from conformance.strategy import job, mean_losses, relative_difference, train
from shardscope.training.context import RankContext
from shardscope.training.loss import resolve_loss
from shardscope.training.sequence import SequenceAxis, SequenceSplit
from shardscope.training.strategies._sequence_check import require_loss_by_parts

COMMS = ("all-gather", "ring", "ulysses")


def dropless() -> nn.Module:
    return mixed(8, shared_ffn=8, dense_layers=1)


def dropping() -> nn.Module:
    """On two ranks, as many experts as tokens of a part, whose places must not be taken for positions."""
    return mixed(8, capacity_factor=0.5)


def mesh(comm: str, **settings: Any) -> ss.Strategy:
    return ss.Strategy("mesh", **{"context": 2, "context_comm": comm, "expert": 2, **settings})


def with_prompts() -> Any:
    """Sequences of which only the second half has targets, so that an early part has none."""
    generator = torch.Generator().manual_seed(0)
    text = torch.randint(256, (96, 17), generator=generator)
    targets = text[:, 1:].clone()
    targets[:, :8] = -100
    rows = torch.utils.data.TensorDataset(text[:, :-1], targets)
    return rows, rows


def without_balance(output: Any, targets: Tensor) -> Tensor:
    scores = output["logits"] if isinstance(output, dict) else output
    return functional.cross_entropy(scores.flatten(0, 1), targets.flatten(), ignore_index=-100)


def with_mean(output: Any, targets: Tensor) -> Tensor:
    return without_balance(output, targets) + output["balance_loss"].mean()


def with_sum(output: Any, targets: Tensor) -> Tensor:
    scores = output["logits"].flatten(0, 1)
    return functional.cross_entropy(scores, targets.flatten(), reduction="sum") + output["balance_loss"].sum()


without_balance.count = lambda targets: int((targets != -100).sum())  # type: ignore[attr-defined]
with_sum.reduction = "sum"  # type: ignore[attr-defined]


@pytest.mark.slow
@pytest.mark.ranks(2)
def test_ranks_whose_part_has_no_targets_average_probabilities_too(pool: RankPool, tmp_path: Path) -> None:
    """The ranks average the gradients of routers' probabilities, whether or not the loss depends on them."""
    fields = {"model": partial(mixed, 8), "data": with_prompts, "loss": without_balance, "steps": 3}
    ours = job(strategy=mesh("ulysses", expert=1), world_size=2, batch=ss.Batch(48, micro_batch=24), **fields)
    alone = job(strategy="single", **fields)
    losses, parameters = pool.run(partial(_trained_alone, alone), tmp_path)[0]
    results = pool.run(partial(train, ours), tmp_path)
    assert mean_losses(results) == pytest.approx(losses, rel=1e-9)
    assert all(relative_difference(found, parameters) < 1e-9 for _, found in results)


def _trained_alone(alone: ss.Job, context: RankContext) -> Any:
    return train(alone, context_for(alone, context)) if context.rank == 0 else None


@pytest.mark.parametrize(("loss", "is_refused"), [(with_mean, False), (with_sum, True)])
def test_a_sum_with_the_balance_loss_is_refused_which_each_rank_would_add(
    loss: Any, is_refused: bool
) -> None:
    batch, resolved = torch.randint(256, (2, 4, 16)), resolve_loss(loss)
    with pytest.raises(ss.SpecError, match="such as a balance loss") if is_refused else nullcontext():
        split = SequenceSplit(SequenceAxis(2), "ring")
        require_loss_by_parts(mixed(8), resolved, resolved.count, split, (batch[0], batch[1]))


@pytest.mark.slow
@pytest.mark.ranks(2)
@pytest.mark.parametrize(
    ("comm", "expert"), [("ring", 2), pytest.param("ulysses", 1, marks=pytest.mark.weekly)]
)
def test_parts_of_sequences_follow_one_process(
    pool: RankPool, tmp_path: Path, comm: str, expert: int
) -> None:
    follow(pool, tmp_path, mesh(comm, expert=expert), dropping, micro_batch=24)


@pytest.mark.weekly
@pytest.mark.ranks(4)
@pytest.mark.parametrize("model", [dropless, dropping])
@pytest.mark.parametrize("comm", COMMS)
@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"expert": 4},
        {"context": 4, "expert": 4},
        {"data": ss.Zero1(bucket_mb=0.02)},
        {"data": ss.Zero2()},
        {"data": ss.Zero3()},
        {"tensor": 2},
        {"pipeline": 2},
    ],
    ids=str,
)
@pytest.mark.parametrize("precision", ["fp64", "fp32"])
def test_every_other_axis_follows_one_process(
    pool: RankPool, tmp_path: Path, settings: dict[str, Any], comm: str, model: Any, precision: str
) -> None:
    follow(pool, tmp_path, mesh(comm, **settings), model, precision=precision)


@pytest.mark.weekly
@pytest.mark.parametrize("comm", COMMS)
@pytest.mark.parametrize(
    "settings",
    [
        {"pipeline": 2},
        {"pipeline": 2, "data": ss.Zero3(), "expert": 4},
        {"pipeline": 2, "data": ss.Zero1(bucket_mb=0.02)},
        {"pipeline": 2, "tensor": 2},
        {"pipeline": 2, "stages": ss.Pipeline(schedule="zbv")},
        {"tensor": 2},
        {"tensor": 2, "data": ss.Zero3()},
    ],
    ids=str,
)
def test_three_and_four_axes_follow_one_process(
    eight: RankPool, tmp_path: Path, settings: dict[str, Any], comm: str
) -> None:
    follow(eight, tmp_path, mesh(comm, **settings), dropping)
