"""Dropout in divided models: which masks the ranks of a tensor group share, and that recomputation draws them again."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import shardscope as ss
from conformance.ranks import RankPool
from conformance.strategy import job
from shardscope.training.context import RankContext
from shardscope.training.tensor import TensorAxis, TensorSplit
from shardscope.training.tensor.random_streams import use_rank_stream, use_shared_stream
from shardscope.training.trainer import Trainer

CPU = torch.device("cpu")


def test_ranks_draw_numbers_of_their_own_and_then_shared_ones_again() -> None:
    drawn = []
    for rank in range(3):
        torch.manual_seed(5)
        torch.rand(2)
        use_rank_stream(rank, CPU)
        use_rank_stream(rank, CPU)  # a second layer of columns, as for keys and values
        alone = torch.rand(4)
        torch.rand(rank)  # ranks need not draw as much as each other
        use_shared_stream(CPU)
        drawn.append((alone, torch.rand(4)))
        use_shared_stream(CPU)
    assert all(torch.equal(drawn[0][1], together) for _, together in drawn)
    assert len({tuple(alone.tolist()) for alone, _ in drawn}) == 3


def test_a_pass_that_is_repeated_from_within_a_divided_part_draws_the_same() -> None:
    torch.manual_seed(5)
    use_rank_stream(1, CPU)
    within = torch.get_rng_state()
    torch.rand(3)
    use_shared_stream(CPU)
    after = torch.rand(4)
    torch.manual_seed(6)
    use_rank_stream(0, CPU)  # the generator has been used for something else in the meantime
    torch.set_rng_state(within)
    torch.rand(3)
    use_shared_stream(CPU)
    assert torch.equal(torch.rand(4), after)


class Probe(nn.Module):
    """Layer that passes its input on, and keeps what it has drawn."""

    def __init__(self) -> None:
        super().__init__()
        self.drawn: list[list[float]] = []

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.drawn.append(torch.rand(4).tolist())
        return x


class Block(nn.Module):
    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(16), nn.Linear(16, 32), nn.Linear(32, 16)
        self.within, self.after = nn.Dropout(dropout), nn.Dropout(dropout)
        self.probe, self.outer_probe = Probe(), Probe()

    def forward(self, x: Tensor) -> Tensor:
        return x + self.outer_probe(
            self.after(self.down(self.probe(self.within(self.up(self.norm(x)).relu()))))
        )


class Dropping(nn.Module):
    """A model of the user's own with dropout within and outside its divided layers."""

    def __init__(self, dropout: float = 0.3) -> None:
        super().__init__()
        self.tokens, self.drop, self.head = nn.Embedding(256, 16), nn.Dropout(dropout), nn.Linear(16, 256)
        self.blocks = nn.ModuleList(Block(dropout) for _ in range(2))
        self.probe = Probe()

    def tensor_plan(self) -> dict[str, str]:
        return {"blocks.*.up": "columns", "blocks.*.down": "rows", "blocks.*": "sequence"}

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.drop(self.tokens(tokens))
        for block in self.blocks:
            x = block(x)
        return self.head(self.probe(x))


def job_of(world_size: int = 4, data: ss.Strategy | str = "ring", **changes: Any) -> ss.Job:
    strategy = ss.Strategy(
        "mesh", data=data, tensor=2, sequence_parallel=changes.pop("sequence_parallel", False)
    )
    fields = {"model": Dropping, "strategy": strategy, "world_size": world_size, "steps": 2}
    return job(**{**fields, **changes})


def _drawn(ours: ss.Job, context: RankContext) -> dict[str, list[list[float]]]:
    trainer = Trainer(ours, context, context.events.path.parent)
    for step in range(1, ours.steps + 1):
        trainer.take_step(step)
    trainer.strategy.close()
    named = trainer.model.named_modules()
    return {name: module.drawn for name, module in named if isinstance(module, Probe)}


@pytest.mark.ranks(4)
@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_ranks_share_the_masks_of_what_they_all_compute(
    pool: RankPool, tmp_path: Path, sequence_parallel: bool
) -> None:
    drawn = pool.run(partial(_drawn, job_of(sequence_parallel=sequence_parallel)), tmp_path)
    for name, first in drawn[0].items():
        assert len(first) == 2  # steps
        is_shared = name == "probe" or (name.endswith("outer_probe") and not sequence_parallel)
        assert (first == drawn[1][name]) == is_shared
        assert (drawn[2][name] == drawn[3][name]) == is_shared
        assert first != drawn[2][name]  # other samples


def _parameters(ours: ss.Job, context: RankContext) -> dict[str, bytes]:
    trainer = Trainer(ours, context, context.events.path.parent)
    for step in range(1, ours.steps + 1):
        trainer.take_step(step)
    found = trainer.strategy.full_parameters()
    trainer.strategy.close()
    return {name: tensor.detach().numpy().tobytes() for name, tensor in found.items()}


@pytest.mark.ranks(4)
@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize("data", ["ring", "zero-3"])
def test_recomputation_draws_the_same_masks_again(
    pool: RankPool, tmp_path: Path, data: str, sequence_parallel: bool
) -> None:
    ours = job_of(data=data, sequence_parallel=sequence_parallel, steps=3)
    plain, selective, full, other = (
        pool.run(partial(_parameters, ours.replace(**changes)), tmp_path)[0]
        for changes in ({}, {"recompute": "selective"}, {"recompute": "full"}, {"seed": 1})
    )
    assert plain == selective == full != other


def _drawn_after_resume(ours: ss.Job, later: ss.Job, folder: str, context: RankContext) -> list[float]:
    trainer = Trainer(ours, context, Path(folder))
    trainer.take_step(1)
    trainer.checkpoints.save(1)
    trainer.strategy.close()
    dist.barrier()
    trainer = Trainer(later, context, context.events.path.parent)
    trainer.resume(Path(folder) / "checkpoints")
    trainer.strategy.close()
    return torch.rand(4).tolist()


@pytest.mark.ranks(4)
@pytest.mark.parametrize("later", ["ring", "data x tensor"])
def test_ranks_that_shared_masks_and_now_have_other_samples_draw_their_own(
    pool: RankPool, tmp_path: Path, later: str
) -> None:
    folder = tmp_path / "saved"
    folder.mkdir()
    ours = job_of()
    if later == "ring":
        other = ours.replace(strategy="ring")
    else:
        ours, other = job_of(strategy=ss.Strategy("mesh", tensor=4)), ours
    drawn = pool.run(partial(_drawn_after_resume, ours, other, str(folder)), tmp_path)
    assert (drawn[0] == drawn[1], drawn[2] == drawn[3]) == (later != "ring",) * 2
    assert len({tuple(each) for each in drawn}) == (4 if later == "ring" else 2)
    assert drawn == pool.run(partial(_drawn_after_resume, ours, other, str(folder)), tmp_path)


def _staged(dropout: float = 0.3) -> nn.Module:
    model = Dropping(dropout)
    return nn.Sequential(model.tokens, model.drop, *model.blocks, model.head)


def _refusal(ours: ss.Job, context: RankContext) -> str:
    try:
        Trainer(ours, context, context.events.path.parent).strategy.close()
    except ss.SpecError as error:
        return str(error)
    return "nothing was refused"


@pytest.mark.ranks(4)
def test_stages_that_begin_with_parts_of_sequences_have_no_dropout(pool: RankPool, tmp_path: Path) -> None:
    plan = {"*.up": "columns", "*.down": "rows", "2": "sequence", "3": "sequence"}
    strategy = ss.Strategy("mesh", tensor=2, pipeline=2, sequence_parallel=True, tensor_plan=plan)
    ours = job(model=_staged, strategy=strategy, world_size=4, batch=ss.Batch(8, micro_batch=4))
    for refusal in pool.run(partial(_refusal, ours), tmp_path):
        assert "sequence_parallel=True in a pipeline is not available" in refusal


class Sum(nn.Module):
    """Two layers with dropout between them, whose output has a known mean and variance."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.drop, self.down = (
            nn.Linear(4, 8, bias=False),
            nn.Dropout(0.5),
            nn.Linear(8, 3, bias=False),
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.drop(self.up(x)))


def _outputs(count: int, context: RankContext) -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(0)
    model = Sum().double()
    hidden = model.up(x := torch.randn(4, dtype=torch.float64))
    terms = (model.down.weight * hidden).detach()  # a mask with a factor of 2 has mean 1 and variance 1
    axis = TensorAxis(context.world_size, context.rank, context.group, draws=True)
    TensorSplit(axis, ss.TensorPlan({"up": "columns", "down": "rows"})).divide(model)
    with torch.no_grad():
        outputs = torch.stack([model(x) for _ in range(count)])
    return outputs, terms.sum(1), terms.square().sum(1)


@pytest.mark.ranks(2)
def test_dropout_within_divided_layers_has_the_distribution_of_one_process(
    pool: RankPool, tmp_path: Path
) -> None:
    """With the same mask on all ranks, terms of different ranks would vary together, and so their sum more or less."""
    count = 4000
    for outputs, mean, variance in pool.run(partial(_outputs, count), tmp_path):
        assert ((outputs.mean(0) - mean).abs() < 4 * (variance / count).sqrt()).all()
        assert ((outputs.var(0) / variance - 1).abs() < 4 * (2 / count) ** 0.5).all()
