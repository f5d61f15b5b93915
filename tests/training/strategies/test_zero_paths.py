"""ZeRO-2 and ZeRO-3 where the model's code decides which layers run: like one process, or one sentence on all ranks."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import shardscope as ss
from conformance.ranks import RankPool
from conformance.strategy import job, relative_difference, train
from shardscope.runlog.writer import EventWriter
from shardscope.spec.shard_buffers import Limits
from shardscope.training.collectives import agreement
from shardscope.training.context import RankContext
from shardscope.training.meter import Meter
from shardscope.training.trainer import Trainer
from shardscope.training.transports.shm import shards

STAGES = ["zero-2", "zero-3"]
Choose = Callable[[int, int], tuple[int, ...]]
"""The branches that a rank takes in a forward pass, both counted from 0."""


class Branching(nn.Module):
    """Branches between a stem and a head; which run is decided in each forward pass.

    Args:
        widths: Of each branch, between its two layers; None for one layer.
        choose: Which run, on which rank and in which forward pass.
        rank: This one.
        apart: Whether each branch is a unit of communication; else it is a bare matrix of the model's own.
    """

    def __init__(self, widths: list[int | None], choose: Choose, rank: int, *, apart: bool = True) -> None:
        super().__init__()
        self.stem, self.head = nn.Linear(64, 12), nn.Linear(12, 10)
        if apart:
            self.branches = nn.ModuleList(_branch(width) for width in widths)
        else:
            self.branches = nn.ParameterList(torch.randn(12, 12) / 4 for _ in widths)
        self.choose, self.rank, self.passes = choose, rank, 0

    def forward(self, images: Tensor) -> Tensor:
        x = torch.tanh(self.stem(images.flatten(1)))
        for i in self.choose(self.rank, self.passes):
            branch = self.branches[i]
            x = x + torch.tanh(branch(x) if isinstance(branch, nn.Module) else x @ branch)
        self.passes += self.training
        return self.head(x)


def _branch(width: int | None) -> nn.Module:
    return nn.Linear(12, 12) if width is None else nn.Sequential(nn.Linear(12, width), nn.Linear(width, 12))


def branching_job(
    strategy: Any,
    place: tuple[int, int],
    widths: list[int | None],
    choose: Choose,
    parts: int,
    **options: Any,
) -> ss.Job:
    """Four steps of `parts` micro-batches each, for one of `world_size` ranks."""
    rank, world_size = place
    batch = ss.Batch(48, micro_batch=48 // world_size // parts)
    return job(
        model=lambda: Branching(widths, choose, rank, **options), data="digits", strategy=strategy,
        world_size=world_size, optimizer="adamw", steps=4, batch=batch,
    )  # fmt: skip


# On all ranks alike: like one process.


@pytest.mark.parametrize("parts", [1, 2])
@pytest.mark.parametrize("stage", [*STAGES, "zero-3:backend"])
@pytest.mark.parametrize("apart", [True, False])
def test_layers_that_all_ranks_skip_or_use_late_follow_one_process(
    pool: RankPool, tmp_path: Path, stage: str, parts: int, apart: bool
) -> None:
    def by_step(_: int, done: int) -> tuple[int, ...]:
        return [(0,), (1,), (), (0, 1)][done // parts]

    def ours(strategy: str, place: tuple[int, int]) -> ss.Job:
        return branching_job(strategy, place, [None, None], by_step, parts, apart=apart)

    ranks = pool.run(lambda c: train(ours(stage, (c.rank, c.world_size)), c)[1], tmp_path)
    with EventWriter(tmp_path / "alone.jsonl", 0) as events:
        alone = RankContext(0, 1, torch.device("cpu"), Meter(), events)
        expected = train(ours("single", (0, 1)), alone)[1]
    for parameters in ranks:
        assert relative_difference(parameters, expected) < 1e-9


# On some ranks only: one sentence.

EQUAL, UNLIKE = [None, None], [7, 5]


def by_rank(rank: int, _: int) -> tuple[int, ...]:
    return (rank % 2,)


def others_from_the_third_pass(rank: int, done: int) -> tuple[int, ...]:
    return (0, 1) if rank or done < 2 else (0,)


def only_the_first_rank(rank: int, _: int) -> tuple[int, ...]:
    return (0,) if rank == 0 else ()


PARTING: list[tuple[str, list[int | None], Choose, dict[str, Any], str]] = [
    ("equal shapes", EQUAL, by_rank, {}, r"layer 'branches.0', but rank 1 .* layer 'branches.1'"),
    ("other shapes", UNLIKE, by_rank, {}, r"layer 'branches.0', but rank 1 .* layer 'branches.1'"),
    ("late", EQUAL, others_from_the_third_pass, {}, r"but rank \d .*layer 'branches.\d'"),
    ("skipped", UNLIKE, only_the_first_rank, {}, r"layer 'branches.[01]', but rank 1 .* layer 'model'"),
    (
        "inside one unit", EQUAL, by_rank, {"apart": False},
        r"reduces the gradients of 'branches.0' in layer 'model', but rank 1 .* of 'branches.1' in layer 'model'",
    ),
]  # fmt: skip


@pytest.fixture
def own_pool(request: pytest.FixtureRequest) -> Iterator[RankPool]:
    """Ranks for this test alone: after a refusal they wait in messages that nobody sends."""
    pool = RankPool(request.param, timeout_s=120)
    yield pool
    pool.close()


def refusal(ours: ss.Job, context: RankContext, folder: Path) -> str:
    trainer = Trainer(ours, context, folder)
    with pytest.raises(ss.SpecError) as refused:
        for step in range(1, ours.steps + 1):
            trainer.take_step(step)
    trainer.strategy.close()
    return str(refused.value)


@pytest.mark.sampled
@pytest.mark.slow
@pytest.mark.parametrize("own_pool", [2, 3, 4], indirect=True)
def test_ranks_that_take_different_branches_refuse_in_one_sentence(
    own_pool: RankPool, tmp_path: Path
) -> None:
    def body(context: RankContext) -> list[tuple[int, str]]:
        said, place = [], (context.rank, context.world_size)
        for i, (_, widths, choose, options, _) in enumerate(PARTING):
            first = (i + context.world_size) % 2
            for stage in STAGES if context.world_size == 2 else STAGES[first : first + 1]:
                parts = 1 + (i // 2 + context.world_size) % 2
                ours = branching_job(stage, place, widths, choose, parts, **options)
                said.append((i, refusal(ours, context, tmp_path)))
        return said

    first, *others = own_pool.run(body, tmp_path)
    assert all(other == first for other in others)
    for i, message in first:
        assert re.search(PARTING[i][-1], message), PARTING[i][0]
        assert re.search(r"micro-batch \d of step \d", message)


class Detaching(Branching):
    """A model whose first branch gets gradients on the first rank only."""

    def forward(self, images: Tensor) -> Tensor:
        x = torch.tanh(self.stem(images.flatten(1)))
        for i, branch in enumerate(self.branches):
            added = torch.tanh(branch(x))
            x = x + (added.detach() if i == 0 and self.rank else added)
        return self.head(x)


@pytest.mark.slow
@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("own_pool", [2, 3], indirect=True)
def test_ranks_that_empty_a_full_buffer_at_different_layers_refuse_in_one_sentence(
    own_pool: RankPool, tmp_path: Path, stage: str
) -> None:
    """Only the first rank has gradients of the large layer, for which it must empty the buffer."""

    def body(context: RankContext) -> str:
        with pytest.MonkeyPatch.context() as patch:
            limits = Limits(reduced=2 * context.world_size * 16_384, together=1024)
            patch.setattr(shards.ShardBuffers, "limits", limits)
            ours = branching_job(stage, (context.rank, context.world_size), [], by_rank, 1)
            ours = ours.replace(model=lambda: Detaching([400, 5, 5], by_rank, context.rank))
            return refusal(ours, context, tmp_path)

    first, *others = own_pool.run(body, tmp_path)
    assert all(other == first for other in others)
    assert re.search(r"in micro-batch 1 of step 1, rank \d .* 'branches.0', but rank \d ", first)


def replica(rank: int, _: int) -> tuple[int, ...]:
    return (rank // 2,)


@pytest.mark.weekly
@pytest.mark.parametrize("own_pool", [4], indirect=True)
def test_other_carriers_refuse_as_well(own_pool: RankPool, tmp_path: Path) -> None:
    """The backend's own collectives, compressed gradients, offloading, and replicas that differ as a whole."""

    def body(context: RankContext) -> list[str]:
        place = (context.rank, context.world_size)
        jobs = [
            branching_job("zero-2:backend", place, EQUAL, by_rank, 1),
            branching_job("zero-3:backend", place, UNLIKE, only_the_first_rank, 2),
            branching_job("zero-2", place, EQUAL, by_rank, 1).replace(compression="int8", precision="fp32"),
            branching_job(ss.Zero3(offload=True), place, EQUAL, by_rank, 1),
            branching_job(ss.Zero3(replicas=2), place, EQUAL, replica, 2),
            branching_job(ss.Zero2(replicas=2), place, EQUAL, replica, 2, apart=False),
        ]
        return [refusal(ours, context, tmp_path) for ours in jobs]

    first, *others = own_pool.run(body, tmp_path)
    assert all(other == first for other in others)
    for message in first:
        assert re.match(
            r"in micro-batch 1 of step 1, rank 0 .*, but rank \d .*; strategy='zero-\d' needs", message
        )
        assert "'branches." in message


@pytest.mark.parametrize("own_pool", [2], indirect=True)
def test_tags_that_are_equal_by_chance_are_found_before_the_update(
    own_pool: RankPool, tmp_path: Path
) -> None:
    def body(context: RankContext) -> tuple[str, bool]:
        agreement._NUM_TAGS = 1
        ours = branching_job("zero-2", (context.rank, 2), EQUAL, by_rank, 1, apart=False)
        trainer = Trainer(ours, context, tmp_path)
        before = [piece.parameter.detach().clone() for piece in trainer.strategy.pieces]
        with pytest.raises(ss.SpecError) as refused:
            trainer.take_step(1)
        after = [piece.parameter for piece in trainer.strategy.pieces]
        return str(refused.value), all(map(torch.equal, before, after))

    for message, unmoved in own_pool.run(body, tmp_path):
        assert "of 'branches.0' in layer 'model', but rank 1" in message
        assert unmoved
