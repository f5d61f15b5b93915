"""Gossip by its own property: the mean is kept, the ranks come together, and the mean model learns."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

import shardscope as ss
from conformance.alone import Never
from conformance.ranks import RankPool
from shardscope.analytic import communication as comm
from shardscope.training.collectives.neighbours import Neighbours
from shardscope.training.context import RankContext
from shardscope.training.trainer import Trainer

NUM_ELEMENTS = 5001


def mixed(context: RankContext, times: int, slice_bytes: int = 4096) -> list[torch.Tensor]:
    """This rank's values before the first averaging and after each."""
    torch.manual_seed(context.rank)
    flat = torch.randn(NUM_ELEMENTS, dtype=torch.float64)
    neighbours = Neighbours(context.group, slice_bytes)
    return [flat.clone(), *(neighbours.average_(flat).clone() for _ in range(times))]


def test_mixing_keeps_the_mean_and_shrinks_the_distance_as_fast_as_its_matrix_says(
    pool: RankPool, tmp_path: Path
) -> None:
    ranks = pool.run(lambda context: mixed(context, times=6), tmp_path)
    rounds = [torch.stack(values) for values in zip(*ranks, strict=True)]
    mean = rounds[0].mean(dim=0)
    distances = [float((values - values.mean(dim=0)).norm()) for values in rounds]
    for values in rounds:
        assert torch.allclose(values.mean(dim=0), mean, rtol=0, atol=1e-12)
    rate = comm.gossip_contraction(pool.world_size)
    for before, after in pairwise(distances):
        assert after <= rate * before + 1e-12


@pytest.mark.parametrize("slice_bytes", [400, 4096, 1 << 20])
def test_slices_change_nothing(pool: RankPool, tmp_path: Path, slice_bytes: int) -> None:
    ours, whole = (
        pool.run(lambda context, size=size: mixed(context, 1, size)[1], tmp_path)
        for size in (slice_bytes, 1 << 30)
    )
    assert all(torch.equal(a, b) for a, b in zip(ours, whole, strict=True))


def digits(world_size: int, **changes: Any) -> ss.Job:
    fields: dict[str, Any] = {
        "model": "mlp",
        "data": "digits",
        "strategy": "gossip",
        "steps": 12,
        "batch": 48,
    }
    return ss.Job(world_size=world_size, **{**fields, **changes})


def run(job: ss.Job, context: RankContext) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    trainer = Trainer(job, context, context.events.path.parent)
    trainer.train(Never())
    own = {name: p.detach().clone() for name, p in trainer.model.named_parameters()}
    mean = {name: p.detach().clone() for name, p in trainer.strategy.full_parameters().items()}
    events = [json.loads(line) for line in context.events.path.read_text().splitlines() if line]
    return events, {"own": own, "mean": mean}


@pytest.mark.parametrize("mix_every", [1, 3])
def test_counts_the_bytes_of_the_formula(pool: RankPool, tmp_path: Path, mix_every: int) -> None:
    job = digits(pool.world_size, strategy=ss.Gossip(mix_every=mix_every, slice_mb=0.01))
    for events, _ in pool.run(lambda context: run(job, context), tmp_path):
        size = 4 * next(e["num_params"] for e in events if e["event"] == "start")
        expected = comm.gossip_mix_bytes(size, pool.world_size)
        assert expected == (2 if pool.world_size > 2 else 1) * size
        for e in (e for e in events if e["event"] == "step"):
            row = e["traffic"].get("gossip_mix", {"sent_bytes": 0, "received_bytes": 0})
            due = expected if e["step"] % mix_every == 0 else 0
            assert (row["sent_bytes"], row["received_bytes"]) == (due, due)


def test_evaluates_the_mean_and_leaves_each_rank_its_own(pool: RankPool, tmp_path: Path) -> None:
    job = digits(pool.world_size, strategy="gossip:5", eval_every=2, precision="fp64", steps=7)
    quiet = job.replace(eval_every=None)
    ranks = [result for _, result in pool.run(lambda context: run(job, context), tmp_path)]
    others = [result for _, result in pool.run(lambda context: run(quiet, context), tmp_path)]
    for name in ranks[0]["own"]:
        mean = torch.stack([result["own"][name] for result in ranks]).mean(dim=0)
        assert all(torch.allclose(result["mean"][name], mean, atol=1e-12) for result in ranks)
        assert not torch.equal(ranks[0]["own"][name], ranks[1]["own"][name])
        assert all(torch.equal(a["own"][name], b["own"][name]) for a, b in zip(ranks, others, strict=True))


def test_the_measured_consensus_is_that_of_the_parameters(pool: RankPool, tmp_path: Path) -> None:
    job = digits(pool.world_size, strategy=ss.Gossip(mix_every=100, measure_every=4), precision="fp64")
    ranks = pool.run(lambda context: run(job, context), tmp_path)
    seen = [[(e["step"], e["distance"]) for e in events if e["event"] == "consensus"] for events, _ in ranks]
    assert [step for step, _ in seen[0]] == [1, 4, 8, 12]
    assert all(rows == seen[0] for rows in seen)
    own = torch.stack([torch.cat([p.flatten() for p in result["own"].values()]) for _, result in ranks])
    mean = own.mean(dim=0)
    expected = float((own - mean).square().sum(dim=1).mean().sqrt() / mean.norm())
    assert seen[0][-1][1] == pytest.approx(expected, rel=1e-9)


@pytest.mark.weekly
def test_reaches_the_accuracy_of_the_ring() -> None:
    def accuracy(strategy: str) -> float:
        job = digits(4, strategy=strategy, steps=150, optimizer=ss.Optimizer("adamw", lr=2e-3))
        found = ss.launch(job).wait(90).summary().test_accuracy
        assert found is not None
        return found

    ring = accuracy("ring")
    assert ring > 0.9
    assert accuracy("gossip") > ring - 0.01


@pytest.mark.slow
def test_goes_on_from_a_checkpoint_as_if_never_interrupted() -> None:
    job = digits(
        3, strategy="gossip:4", optimizer="lamb", precision="fp64", checkpoint=ss.Checkpoint(at_end=True)
    )
    whole = ss.launch(job).wait(60)
    half = ss.launch(job.replace(steps=6)).wait(60)
    rest = ss.launch(job, resume=half).wait(60)
    assert list(rest.metrics()["loss"]) == pytest.approx(list(whole.metrics()["loss"])[6:], rel=1e-12)
    fewer = ss.launch(job.replace(world_size=2), resume=half).wait(60)
    (notes,) = {tuple(event["notes"]) for event in fewer.events("resume")}
    assert "the weights resume from the mean, the optimizer state is reset" in notes[0]


def test_each_rank_goes_on_with_its_own_loss_scale(pool: RankPool, tmp_path: Path) -> None:
    job = digits(pool.world_size, precision="fp16-mixed", checkpoint=ss.Checkpoint(at_end=True))

    def scales(context: RankContext) -> tuple[float | None, float | None]:
        first, again = (Trainer(job, context, tmp_path) for _ in range(2))
        for _ in range(context.rank):
            first.strategy.precision.follow(skipped=True)
        first.take_step(1)
        first._save(1)
        again.resume(tmp_path / "checkpoints")
        return first.strategy.precision.loss_scale, again.strategy.precision.loss_scale

    rows = pool.run(scales, tmp_path)
    assert len({before for before, _ in rows}) == pool.world_size
    assert all(before == after for before, after in rows)
