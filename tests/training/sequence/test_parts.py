"""Models over parts of sequences: attention and positions are those of whole sequences, and misfits are refused."""

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
from conformance.one_process import hold_evaluation
from conformance.ranks import RankPool
from conformance.strategy import Result, job, mean_losses, relative_difference, tiny_gpt, train
from shardscope.spec.models import GPTConfig
from shardscope.training.context import RankContext
from shardscope.training.loss import resolve_loss
from shardscope.training.models import build_model
from shardscope.training.sequence import SequenceAxis, SequenceSplit
from shardscope.training.sequence.blocks import attend, attend_backward, blocks_of
from shardscope.training.strategies._sequence_check import require_loss_by_parts
from shardscope.training.trainer import Trainer

COMMS = ["all-gather", "ring", "ulysses"]


def mesh(comm: str = "all-gather", context: int = 2, **settings: Any) -> ss.Strategy:
    return ss.Strategy("mesh", context=context, context_comm=comm, **settings)


def trained(ours: ss.Job, context: RankContext) -> Result:
    return train(ours, context_for(ours, context))


def follow_one_process(pool: RankPool, folder: Path, ours: ss.Job) -> None:
    """Assert that losses and parameters are those of the same job on one process."""
    alone = ours.replace(strategy="single", world_size=1, batch=ours.batch.global_batch, recompute="none")
    losses, expected = pool.run(partial(trained, alone), folder)[0]
    results = pool.run(partial(trained, ours), folder)
    assert mean_losses(results) == pytest.approx(losses, rel=1e-9)
    for _, parameters in results:
        assert relative_difference(parameters, expected) < 1e-9


# Sequences of 4,096 tokens.


def long_gpt() -> nn.Module:
    return build_model(GPTConfig(layers=1, hidden=16, heads=4, vocab=256, seq=4096, ffn=32))


@pytest.mark.slow
@pytest.mark.ranks(4)
@pytest.mark.parametrize(
    "comm", ["ring", *(pytest.param(comm, marks=pytest.mark.weekly) for comm in ("all-gather", "ulysses"))]
)
def test_sequences_of_4096_tokens_train_as_on_one_process(pool: RankPool, tmp_path: Path, comm: str) -> None:
    fields = {"model": long_gpt, "batch": ss.Batch(2, micro_batch=1), "steps": 2}
    follow_one_process(pool, tmp_path, job(strategy=mesh(comm, 4), world_size=4, **fields))


# A model of one's own.


class Rotary(nn.Module):
    """A transformer that takes positions as rows of a parameter and of a buffer, and shares keys between heads."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(256, 32)
        self.places = nn.Parameter(torch.randn(64, 32) * 0.02)
        angles = torch.arange(64)[:, None] / 100 ** (torch.arange(4) / 4)
        self.register_buffer("turns", torch.stack([angles.cos(), angles.sin()]))
        self.query, self.pair, self.out = nn.Linear(32, 32), nn.Linear(32, 32), nn.Linear(32, 32)
        self.norm, self.head = nn.RMSNorm(32), nn.Linear(32, 256)

    def turned(self, x: Tensor) -> Tensor:
        cos, sin = self.turns[:, : x.shape[2]]
        one, two = x.chunk(2, -1)
        return torch.cat([one * cos - two * sin, one * sin + two * cos], -1)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens) + self.places[: tokens.shape[1]]
        y = self.norm(x)
        q = self.query(y).unflatten(-1, (4, 8)).transpose(1, 2)
        k, v = self.pair(y).unflatten(-1, (2, 2, 8)).permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(
            self.turned(q), self.turned(k), v, is_causal=True, scale=0.5, enable_gqa=True
        )
        return self.head(x + self.out(mixed.transpose(1, 2).flatten(2)))


def windows(seq: int = 64) -> tuple[Any, Any]:
    tokens = torch.randint(256, (64, seq + 1), generator=torch.Generator().manual_seed(1))
    pair = torch.utils.data.TensorDataset(tokens[:, :-1], tokens[:, 1:])
    return pair, pair


class Everywhere(nn.Module):
    """Attention in both directions, as of an encoder."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(256, 32), nn.Embedding(64, 32)
        self.triple, self.head = nn.Linear(32, 96), nn.Linear(32, 256)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens) + self.places(torch.arange(0, tokens.shape[1], dtype=torch.int32))
        q, k, v = self.triple(x).unflatten(-1, (3, 4, 8)).permute(2, 0, 3, 1, 4)
        return self.head(x + functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


@pytest.mark.ranks(2)
@pytest.mark.parametrize("comm", COMMS)
@pytest.mark.parametrize("model", [Rotary, Everywhere])
def test_a_model_of_ones_own_trains_as_on_one_process(
    pool: RankPool, tmp_path: Path, comm: str, model: type[nn.Module]
) -> None:
    ours = job(
        strategy=mesh(comm),
        world_size=2,
        model=model,
        data=windows,
        batch=ss.Batch(8, micro_batch=4),
        steps=4,
    )
    follow_one_process(pool, tmp_path, ours.replace(recompute="selective"))


def partly_labelled() -> tuple[Any, Any]:
    """Windows with fewer targets in the first half, which context ranks have unequally."""
    pair, _ = windows()
    tokens, targets = (each.clone() for each in pair.tensors)
    targets[:, :20] = -100
    targets[::2, 40:50] = -100
    pair = torch.utils.data.TensorDataset(tokens, targets)
    return pair, pair


@pytest.mark.ranks(4)
@pytest.mark.parametrize("comm", COMMS)
def test_ranks_with_unequally_many_targets_weigh_by_them(pool: RankPool, tmp_path: Path, comm: str) -> None:
    ours = job(
        strategy=mesh(comm),
        world_size=4,
        model=Rotary,
        data=partly_labelled,
        batch=ss.Batch(8, micro_batch=2),
        steps=3,
    )
    follow_one_process(pool, tmp_path, ours)


# Blocks of attention.


@pytest.mark.parametrize("is_causal", [True, False])
@pytest.mark.parametrize("device", ["cpu", "other"])
def test_blocks_together_attend_as_one(is_causal: bool, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    size, each = 3, 8
    if device != "cpu":  # what other devices compute
        monkeypatch.setattr("shardscope.training.sequence.blocks._is_on_cpu", lambda _: False)
    draw = torch.Generator().manual_seed(0)
    q, k, v, end = (torch.randn(2, 4, size * each, 6, dtype=torch.float64, generator=draw) for _ in range(4))
    k, v = k[:, :2], v[:, :2]
    q, k, v = (tensor.clone().requires_grad_() for tensor in (q, k, v))
    whole = functional.scaled_dot_product_attention(q, k, v, is_causal=is_causal, enable_gqa=True)
    expected = torch.autograd.grad(whole, (q, k, v), end)
    splits = [SequenceSplit(SequenceAxis(size, rank), "ring") for rank in range(size)]

    def part(split: SequenceSplit, tensor: Tensor) -> Tensor:
        return split.part(tensor.detach().transpose(1, 2)).transpose(1, 2)

    sums = [torch.zeros(2, 2, each, 6, dtype=torch.float64) for _ in range(2 * size)]
    for rank, split in enumerate(splits):
        mine, parts = part(split, q), []
        for block in blocks_of(rank, size, each, is_causal=is_causal):
            pair = [part(splits[block.source], tensor)[..., block.keys, :] for tensor in (k, v)]
            found = attend(mine[..., block.queries, :], *pair, is_causal=block.is_causal, scale=6**-0.5)
            parts.append((block, pair, found))
        scores = torch.stack([_spread(found[1], block.queries, each) for block, _, found in parts])
        total = scores.logsumexp(0)
        outputs = sum(
            _spread(found[0], block.queries, each, 0.0) * (score - total).exp().unsqueeze(-1)
            for (block, _, found), score in zip(parts, scores, strict=True)
        )
        torch.testing.assert_close(outputs, part(split, whole))
        of_query = torch.zeros_like(mine)
        for block, pair, _ in parts:
            at = block.queries
            found = attend_backward(
                part(split, end)[..., at, :], (mine[..., at, :], *pair), (outputs[..., at, :], total[..., at]),
                is_causal=block.is_causal, scale=6**-0.5,
            )  # fmt: skip
            of_query[..., at, :] += found[0]
            for place, gradient in enumerate(found[1:]):
                sums[2 * block.source + place][..., block.keys, :] += gradient
        torch.testing.assert_close(of_query, part(split, expected[0]))
    for rank, split in enumerate(splits):
        torch.testing.assert_close(sums[2 * rank], part(split, expected[1]))
        torch.testing.assert_close(sums[2 * rank + 1], part(split, expected[2]))


def _spread(part: Tensor, queries: slice, length: int, empty: float = -torch.inf) -> Tensor:
    """Return a block's values at the places of its queries, and `empty` elsewhere."""
    whole = torch.full((*part.shape[:2], length, *part.shape[3:]), empty, dtype=part.dtype)
    whole[:, :, queries] = part
    return whole


def test_causal_blocks_are_equal_work_on_all_ranks() -> None:
    def work(rank: int) -> int:
        blocks = blocks_of(rank, 4, 8, is_causal=True)
        return sum(
            len(range(8)[b.queries]) * len(range(8)[b.keys]) // (2 if b.is_causal else 1) for b in blocks
        )

    assert len({work(rank) for rank in range(4)}) == 1


@pytest.mark.parametrize("comm", COMMS)
def test_positions_are_those_of_the_parts(comm: str) -> None:
    places = torch.arange(24)[None, :, None]
    for rank in range(3):
        split = SequenceSplit(SequenceAxis(3, rank), comm)
        assert torch.equal(split.positions(torch.arange(8)), split.part(places).flatten())


# Refusals.


class Changed(Rotary):
    """Rotary with its attention or positions changed by a function, as misfits."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how
        if how == "multi-head":
            self.attention = nn.MultiheadAttention(32, 4, batch_first=True)
        if how == "batch norm":
            self.batch = nn.BatchNorm1d(32)

    def forward(self, tokens: Tensor) -> Tensor:
        how, x = self.how, self.tokens(tokens)
        if how == "multi-head":
            return self.head(self.attention(x, x, x, need_weights=False)[0])
        if how == "pooled":
            return self.head(x - x.mean(1, keepdim=True))
        if how == "counted":
            return self.head(x + self.places[torch.ones_like(tokens).cumsum(1) - 1])
        if how == "batch norm":
            return self.head(self.batch(x.transpose(1, 2)).transpose(1, 2))
        q = x.unflatten(-1, (4, 8)).transpose(1, 2)
        mask = torch.ones(q.shape[2], q.shape[2], dtype=torch.bool).tril() if how == "mask" else None
        dropout = 0.1 if how == "dropout" and self.training else 0.0
        mixed = functional.scaled_dot_product_attention(q, q, q, attn_mask=mask, dropout_p=dropout)
        return self.head(mixed.transpose(1, 2).flatten(2))


def classes() -> tuple[Any, Any]:
    pair = torch.utils.data.TensorDataset(windows()[0].tensors[0], torch.zeros(64, dtype=torch.int64))
    return pair, pair


def _refused(ours: ss.Job, context: RankContext) -> str:
    try:
        trainer = Trainer(ours, context, context.events.path.parent)
        trainer.take_step(1)
    except ss.SpecError as error:
        return str(error)
    return "nothing was refused"


@pytest.mark.ranks(2)
@pytest.mark.parametrize(
    ("changes", "told"),
    [
        (
            {"model": partial(Changed, "mask")},
            "the model's attention has an attn_mask, which context=2 does not",
        ),
        ({"model": partial(Changed, "dropout")}, "the model's attention has dropout_p=0.1"),
        (
            {"model": partial(Changed, "pooled")},
            "the model does not compute what it does with whole sequences",
        ),
        (
            {"model": partial(Changed, "counted")},
            "the model does not compute what it does with whole sequences",
        ),
        ({"model": partial(Changed, "multi-head")}, "the model does not compute what it does with whole"),
        ({"model": partial(Changed, "batch norm")}, "the model does not compute what it does with whole"),
        (
            {"data": classes},
            "divides sequences, the second dimension of every tensor of a batch, but one has the",
        ),
        ({"data": partial(windows, 62)}, "needs sequences of a multiple of 4 tokens, but they have 62"),
    ],
)
def test_what_is_not_divided_by_tokens_is_refused(
    pool: RankPool, tmp_path: Path, changes: dict[str, Any], told: str
) -> None:
    fields = {"model": Rotary, "data": windows, "batch": 8, "steps": 1, **changes}
    for refusal in pool.run(partial(_refused, job(strategy=mesh(), world_size=2, **fields)), tmp_path):
        assert told in refusal


def _each(output: Any, targets: Tensor) -> Tensor:
    return functional.cross_entropy(output.flatten(0, 1), targets.flatten(), reduction="none").view(
        targets.shape
    )


def _of_next(output: Any, targets: Tensor) -> Tensor:
    return _each(output[:, :-1], targets[:, 1:]).mean()


def _of_sequences(output: Any, targets: Tensor) -> Tensor:
    return _each(output, targets).mean(1).square().mean()


def _of_tokens(output: Any, targets: Tensor) -> Tensor:
    return _each(output, targets).sqrt().mean()


def _sum(output: Any, targets: Tensor) -> Tensor:
    return _each(output, targets).sum()


_sum.reduction = "sum"  # type: ignore[attr-defined]


@pytest.mark.parametrize("comm", COMMS)
@pytest.mark.parametrize(
    ("loss", "is_refused"), [(_of_next, True), (_of_sequences, True), (_of_tokens, False), (_sum, False)]
)
def test_a_loss_that_is_not_one_of_tokens_is_refused(loss: Any, is_refused: bool, comm: Any) -> None:
    batch, resolved = tuple(torch.randint(256, (2, 4, 16))), resolve_loss(loss)
    split = SequenceSplit(SequenceAxis(2), comm)
    with pytest.raises(ss.SpecError, match="is not the mean of its values") if is_refused else nullcontext():
        require_loss_by_parts(tiny_gpt(), resolved, resolved.count, split, (batch[0], batch[1]))


@pytest.mark.ranks(2)
def test_a_job_with_such_a_loss_is_refused_on_all_ranks(pool: RankPool, tmp_path: Path) -> None:
    ours = job(strategy=mesh(), world_size=2, model=tiny_gpt, loss=_of_next)
    for refusal in pool.run(partial(_refused, ours), tmp_path):
        assert "loss='_of_next' of whole sequences is not the mean of its values" in refusal


# Evaluation and events.


@pytest.mark.ranks(4)
@pytest.mark.parametrize("comm", COMMS)
def test_an_evaluation_counts_each_token_once(pool: RankPool, tmp_path: Path, comm: str) -> None:
    hold_evaluation(pool, tmp_path, job(strategy=mesh(comm), world_size=4, model=tiny_gpt))
