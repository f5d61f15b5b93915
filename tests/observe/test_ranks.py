"""Observed loops on real ranks: collectives on some ranks only, uneven numbers of steps, a recording that stops."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.join import Join
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import shardscope as ss
from conformance.ranks import RankPool
from shardscope.commands import runs as listing
from shardscope.runtime.observe._recorder import StepRecorder
from shardscope.training.context import RankContext
from shardscope_widgets.report.entries import groups_of
from shardscope_widgets.report.findings import tried_text
from shardscope_widgets.training_lab._runbook import RunBook
from shardscope_widgets.training_lab._words import status_text

kept: list[Any] = []
"""Groups and their users: torch can deadlock if it frees gloo's group right after a backward pass."""


@contextmanager
def gloo_alone() -> Iterator[None]:
    """Make a group of gloo the default group, as in a user's script."""
    ours = dist.group.WORLD
    gloo = dist.new_group(backend="gloo")
    kept.append(gloo)
    dist.distributed_c10d._update_default_pg(gloo)
    try:
        yield
    finally:
        dist.barrier()
        dist.distributed_c10d._update_default_pg(ours)


Loop = Callable[[RankContext, nn.Module, torch.optim.Optimizer], None]


def observed(
    pool: RankPool, folder: Path, loop: Loop, wrap: Callable[[nn.Module], nn.Module] = DistributedDataParallel,
    make: Callable[..., torch.optim.Optimizer] = torch.optim.SGD,
) -> ss.Run:  # fmt: skip
    """The run of a loop that all ranks train."""

    def train(context: RankContext) -> None:
        with gloo_alone():
            torch.manual_seed(0)
            model = wrap(nn.Linear(5, 2))
            optimizer = make(model.parameters(), lr=0.1)
            kept.append(model)
            with ss.observe(model, optimizer, root=folder / "runs"):
                loop(context, model, optimizer)

    pool.run(train, folder)
    (run,) = ss.runs(folder / "runs")
    return run


def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad()
    model(torch.ones(6, 5)).square().mean().backward()
    optimizer.step()


@pytest.mark.slow
def test_collectives_on_some_ranks_only_end_no_recording(pool: RankPool, tmp_path: Path) -> None:
    def loop(context: RankContext, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        rank, world = context.rank, context.world_size
        for _ in range(2):
            step(model, optimizer)
            last = world - 1
            dist.gather(
                torch.ones(3), [torch.ones(3) for _ in range(world)] if rank == last else None, dst=last
            )
            dist.gather_object({"rank": rank}, [None] * world if rank == 0 else None, dst=0)
            dist.scatter_object_list([None], [*range(world)] if rank == 0 else None, src=0)
            dist.all_reduce(torch.eye(4)[: rank + 1].to_sparse().sum(0))
            dist.monitored_barrier()

    run = observed(pool, tmp_path, loop)
    assert (run.state, run.reason) == ("completed", None)
    for rank in range(pool.world_size):
        assert len(run.events("step", rank)) == 2
        assert "gather" in run.events("step", rank)[1]["traffic"]


@pytest.mark.slow
def test_a_recording_that_stops_on_one_rank_is_shown_everywhere(pool: RankPool, tmp_path: Path) -> None:
    def loop(context: RankContext, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        step(model, optimizer)
        fails = patch.object(StepRecorder, "forward_begins", side_effect=IndexError("of the observer"))
        with fails if context.rank == 1 else nullcontext():
            step(model, optimizer)
        step(model, optimizer)

    run = observed(pool, tmp_path, loop)
    told = "ss.observe stopped recording (IndexError: of the observer)"
    assert (run.state, run.state_text, run.reason) == ("stopped", "recording stopped", f"on rank 1, {told}")
    assert run.summary().state == "stopped"
    assert told in run._repr_html_()
    assert any(told in note for note in ss.compare(run).notes)
    (row,) = [listing.describe(each) for each in ss.runs(tmp_path / "runs")]
    assert "recording stopped" in listing._cells(row, ["id", "state"])
    assert told in tried_text(groups_of([run])[0])
    book = RunBook(tmp_path / "runs")
    book.find()
    assert told in status_text(book.entries[run.id])


def test_steps_that_only_some_ranks_took_count(pool: RankPool, tmp_path: Path) -> None:
    def loop(context: RankContext, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        with Join([model]):  # type: ignore[list-item]
            for _ in range(3 + 2 * context.rank):
                step(model, optimizer)

    run = observed(pool, tmp_path, loop)
    most = 3 + 2 * (pool.world_size - 1)
    assert (run.state, run.summary().steps, run.job.steps) == ("completed", most, most)
    samples = [
        6 * sum(number <= 3 + 2 * rank for rank in range(pool.world_size)) for number in range(1, most + 1)
    ]
    assert run.reduced().steps.column("samples").tolist() == samples


@pytest.mark.slow
@pytest.mark.parametrize("where", ["forward", "backward", "both"])
def test_exchanges_of_gradients_are_decided_in_the_forward_pass(
    pool: RankPool, tmp_path: Path, where: str
) -> None:
    """Backward passes alone within `no_sync` do exchange gradients, as DDP documents."""

    def loop(_: RankContext, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        assert isinstance(model, DistributedDataParallel)
        for _ in range(2):
            for part in range(3):
                is_last = part == 2
                with model.no_sync() if where != "backward" and not is_last else nullcontext():
                    loss = model(torch.ones(6, 5)).square().mean()
                with model.no_sync() if where != "forward" and not is_last else nullcontext():
                    loss.backward()
            optimizer.step()
            optimizer.zero_grad()

    run = observed(pool, tmp_path, loop)
    assert run.job.exchanges == (3 if where == "backward" else 1)
    assert ss.compare(run).disagreeing == ()


def test_optimizer_state_sharded_by_torch_is_counted(pool: RankPool, tmp_path: Path) -> None:
    def loop(_: RankContext, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        for _ in range(3):
            step(model, optimizer)

    def make(parameters: Any, lr: float) -> torch.optim.Optimizer:
        from torch.distributed.optim import ZeroRedundancyOptimizer  # warns when it is imported

        return ZeroRedundancyOptimizer(parameters, torch.optim.AdamW, lr=lr)

    run = observed(pool, tmp_path, loop, make=make)
    kept_by = [run.events("memory", rank)[-1]["optimizer"] for rank in range(pool.world_size)]
    assert (
        sum(kept_by) == 2 * 4 * 12 + 4 * 2
    )  # two moments of each element, and a number of steps per parameter
    assert run.summary().steps == 3


def divided_and_sharded(_: nn.Module) -> nn.Module:
    """A model on a mesh of two axes: layers divided by columns and rows, and their parts sharded over data ranks."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
    model = nn.Sequential(nn.Linear(5, 8), nn.ReLU(), nn.Linear(8, 2))
    parallelize_module(model, mesh["tensor"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
    fully_shard(model, mesh=mesh["data"])
    return model


@pytest.mark.slow
@pytest.mark.ranks(4)
def test_samples_that_a_tensor_group_shares_count_once_and_its_bytes_are_not_predicted(
    pool: RankPool, tmp_path: Path
) -> None:
    def loop(_: RankContext, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        for _ in range(2):
            step(model, optimizer)

    run = observed(pool, tmp_path, loop, divided_and_sharded)
    assert (run.state, run.reason, run.job.wrapper) == ("completed", None, "mesh")
    assert run.job.strategy.label == "observed (mesh)"
    assert run.job.batch.global_batch == 2 * 6
    assert run.reduced().steps.column("samples").tolist() == [2 * 6] * 2
    assert {"all_gather", "reduce_scatter", "all_reduce"} <= run.events("step", 0)[1]["traffic"].keys()
    predicted = ss.predict(run.job)
    assert (predicted.traffic, predicted.states) == (None, None)
    found = ss.compare(run)
    assert "Bytes and messages are left out: the strategy has no formula for its traffic." in found.notes
    assert found.disagreeing == ()


def fsdp1(model: nn.Module) -> nn.Module:
    from torch.distributed.fsdp import FullyShardedDataParallel

    return FullyShardedDataParallel(model, device_id=torch.device("cpu"))


@pytest.mark.slow
@pytest.mark.parametrize("wrap", [DistributedDataParallel, fully_shard, fsdp1])
def test_accumulated_passes_of_every_wrapper_add_to_the_loss(
    pool: RankPool, tmp_path: Path, wrap: Callable[[nn.Module], nn.Module]
) -> None:
    """Wrappers write to the weights between passes, which makes none of them a second evaluation."""

    def loop(_: RankContext, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        for _ in range(2):
            for part in range(3):
                (model(torch.full((4, 5), 1.0 + part)).square().mean() / 3).backward()
            optimizer.step()
            optimizer.zero_grad()

    run = observed(pool, tmp_path, loop, wrap)
    assert (run.state, run.reason) == ("completed", None)
    assert {event["samples"] for event in run.events("step")} == {12}
    torch.manual_seed(0)
    model = nn.Linear(5, 2)
    losses = [float(model(torch.full((4, 5), 1.0 + part)).square().mean().detach()) / 3 for part in range(3)]
    assert run.events("step", 0)[0]["loss"] == pytest.approx(sum(losses))
