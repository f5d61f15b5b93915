"""The parameter server with packed pushes: as one process packs them, to the byte, in every mode."""

from __future__ import annotations

import json
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import shardscope as ss
from conformance.alone import Never
from conformance.methods import carried_by
from conformance.ranks import RankPool
from oracle.updates import in_blocks
from shardscope.analytic import communication as comm
from shardscope.training.context import RankContext
from shardscope.training.data import GlobalSampler, Loader, load_data
from shardscope.training.trainer import Trainer

STEPS, BLOCK, RATE = 6, 64, 0.2


def net() -> nn.Module:
    torch.manual_seed(5)
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 13), nn.ReLU(), nn.Linear(13, 10))


def job_of(world_size: int, strategy: Any, **changes: Any) -> ss.Job:
    fields: dict[str, Any] = {
        "model": net, "data": "digits", "steps": STEPS, "batch": 48,
        "optimizer": ss.Optimizer("sgd", lr=RATE, momentum=0.0), "compression": ss.Compression("int8", block=BLOCK),
    }  # fmt: skip
    return ss.Job(strategy=strategy, world_size=world_size, **{**fields, **changes})


def run(job: ss.Job, context: RankContext) -> tuple[list[dict[str, Any]], dict[str, torch.Tensor], Trainer]:
    trainer = Trainer(job, context, context.events.path.parent)
    trainer.train(Never())
    events = [json.loads(line) for line in context.events.path.read_text().splitlines() if line]
    parameters = {name: p.detach().clone() for name, p in trainer.strategy.full_parameters().items()}
    return events, parameters, trainer


def steps_of(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [event for event in events if event["event"] == "step"]


def one_process(workers: int, shards: list[list[int]], *, feedback: bool) -> list[torch.Tensor]:
    """The parameters that synchronous workers arrive at, each shard packed by itself, computed in one process."""
    model, data = net(), load_data("digits", seed=0)
    parameters = list(model.parameters())
    sampler = GlobalSampler(len(data.train), 48, 0)
    loaders = [Loader(data.train, sampler, rank=w, world_size=workers) for w in range(workers)]
    owed = [[np.zeros(sum(parameters[i].numel() for i in s), np.float32) for s in shards] for _ in loaders]
    for step in range(STEPS):
        totals = [np.zeros_like(residual) for residual in owed[0]]
        for w, loader in enumerate(loaders):
            inputs, targets = loader.batch(step)
            model.zero_grad()
            nn.functional.cross_entropy(model(inputs), targets).backward()
            for s, shard in enumerate(shards):
                gradient = np.concatenate([parameters[i].grad.numpy().ravel() for i in shard])
                values = gradient + owed[w][s] * feedback
                back = in_blocks(values, BLOCK, 127)
                owed[w][s] = values - back
                totals[s] += back / workers
        with torch.no_grad():
            for s, shard in enumerate(shards):
                sizes = np.cumsum([parameters[i].numel() for i in shard])[:-1]
                for i, part in zip(shard, np.split(totals[s], sizes), strict=True):
                    parameters[i] -= RATE * torch.from_numpy(part).view_as(parameters[i])
    for loader in loaders:
        loader.close()
    return [parameter.detach() for parameter in parameters]


@pytest.mark.parametrize("feedback", [False, True], ids=["plain", "feedback"])
@pytest.mark.parametrize(
    "strategy",
    [ss.ParameterServer(servers=2), ss.ParameterServer(dedicated=True), ss.ParameterServer(mode="ssp", staleness=0)],
    ids=lambda s: s.label,
)  # fmt: skip
def test_a_synchronous_run_is_what_one_process_packs(
    pool: RankPool, tmp_path: Path, strategy: ss.ParameterServer, feedback: bool
) -> None:
    job = job_of(
        pool.world_size, strategy, compression=ss.Compression("int8", block=BLOCK, feedback=feedback)
    )
    ranks = pool.run(lambda context: run(job, context)[1], tmp_path)
    shards = strategy.shards([p.numel() for p in net().parameters()])
    expected = one_process(job.num_data_ranks, shards, feedback=feedback)
    for parameters in ranks:
        for ours, theirs in zip(parameters.values(), expected, strict=True):
            assert torch.allclose(ours, theirs, rtol=0, atol=2e-5)


@pytest.mark.parametrize(
    "strategy", [ss.ParameterServer(servers=2), ss.ParameterServer(dedicated=True)], ids=lambda s: s.label
)
def test_pushes_are_as_long_as_the_formula_says(
    pool: RankPool, tmp_path: Path, strategy: ss.ParameterServer
) -> None:
    methods, world = carried_by("parameter-server"), pool.world_size

    def body(context: RankContext) -> list[dict[str, Any]]:
        return [
            steps_of(run(job_of(world, strategy, compression=m, steps=1), context)[0])[-1]["traffic"]
            for m in methods
        ]

    ranks = pool.run(body, tmp_path)
    sizes = [p.numel() for p in net().parameters()]
    elements = [sum(sizes[i] for i in shard) for shard in strategy.shards(sizes)]
    layout = {"dedicated": strategy.dedicated}
    for i, method in enumerate(methods):
        packets = [method.packet_bytes(count) for count in elements]
        formulas = {
            "server_push": comm.parameter_server_push_bytes(packets, world, **layout),
            "server_pull": comm.parameter_server_pull_bytes(
                [4 * count for count in elements], world, **layout
            ),
            "server_control": comm.parameter_server_control_bytes(len(elements), world, **layout),
        }
        for name, formula in formulas.items():
            sent = [rank[i].get(name, {"sent_bytes": 0})["sent_bytes"] for rank in ranks]
            assert sent == list(formula), (method.label, name)


@pytest.mark.parametrize("mode", ["async", "ssp"])
def test_stale_gradients_train_when_packed(pool: RankPool, tmp_path: Path, mode: str) -> None:
    methods = [ss.Compression("none"), ss.Compression("int4", feedback=True), ss.Compression("fp16")]

    def body(context: RankContext) -> list[float]:
        losses = []
        for method in methods:
            fields = {"compression": method, "steps": 60, "optimizer": ss.Optimizer("adamw", lr=0.02)}
            job = job_of(context.world_size, f"parameter-server:{mode}", **fields)
            rows = steps_of(run(job, context)[0])
            losses.append(fmean(e["loss"] for e in rows[-8:] if e["loss"] is not None))
        return losses

    rows = pool.run(body, tmp_path)
    losses = [sum(row) / len(row) for row in zip(*rows, strict=True)]
    assert max(losses) < 1.4  # from 2.3; when gradients are applied is not the same in any two runs


def test_what_a_worker_owes_is_counted_where_it_is(pool: RankPool, tmp_path: Path) -> None:
    strategy = ss.ParameterServer(dedicated=True)
    job = job_of(pool.world_size, strategy, compression=ss.Compression("int8", feedback=True))

    def body(context: RankContext) -> int:
        trainer = run(job, context)[2]
        assert trainer.strategy.compressor is not None
        buffers = {id(tensor) for tensor in trainer.strategy.held(trainer.optimizer)["buffers"]}
        kept = trainer.strategy.compressor.work_space
        assert {id(tensor) for tensor in kept} <= buffers
        return sum(tensor.numel() for tensor in kept)

    elements = sum(p.numel() for p in net().parameters())
    assert pool.run(body, tmp_path) == [0] + [elements] * (pool.world_size - 1)


def test_an_overflow_in_fp16_is_skipped_as_without_packing(pool: RankPool, tmp_path: Path) -> None:
    def steep(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return 3e3 * nn.functional.cross_entropy(output, target)

    def skips(method: str, folder: Path) -> list[bool]:
        folder.mkdir()
        job = job_of(
            pool.world_size, "parameter-server", compression=method, precision="fp16-mixed", loss=steep,
            optimizer=ss.Optimizer("sgd", lr=1e-6, momentum=0.0),
        )  # fmt: skip
        events = pool.run(lambda context: run(job, context)[0], folder)[0]
        return [e["skipped"] for e in steps_of(events)]

    expected = skips("none", tmp_path / "plain")
    assert expected[0]
    assert skips("fp16", tmp_path / "packed") == expected
