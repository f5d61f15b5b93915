"""The noise scale that ranks measure, against every single sample's gradient at the same parameters."""

from __future__ import annotations

import json
import tempfile
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.func import functional_call, grad, vmap

import shardscope as ss
from shardscope.analytic.large_batch import estimate
from shardscope.runlog.writer import EventWriter
from shardscope.training.context import RankContext
from shardscope.training.gradient_noise import GradientNoise
from shardscope.training.meter import Meter
from shardscope.training.sketch import SIZE
from shardscope.training.trainer import Trainer

STEPS, BATCH = 60, 64
ON = ss.Record(noise_scale=True)
STANDSTILL = ss.Optimizer("sgd", lr=1e-12)


def job(**changes) -> ss.Job:
    """Parameters that stand still, so that all steps measure one and the same noise scale."""
    fields = {"model": "mlp", "data": "digits", "batch": BATCH, "optimizer": STANDSTILL, "record": ON}
    return ss.Job(**{**fields, "steps": STEPS, **changes})


def steps_of(ours: ss.Job):
    """On each rank: the step events of a training."""

    def train(context):
        written = len(context.events.path.read_text())
        trainer = Trainer(ours, context, context.events.path.parent)
        for step in range(1, ours.steps + 1):
            trainer.take_step(step)
        trainer.strategy.close()
        events = map(json.loads, context.events.path.read_text()[written:].strip().splitlines())
        return [event for event in events if event["event"] == "step"]

    return train


def alone(ours: ss.Job):
    with tempfile.TemporaryDirectory() as folder, EventWriter(Path(folder) / "rank-0.jsonl", 0) as events:
        return steps_of(ours)(RankContext(0, 1, torch.device("cpu"), Meter(), events))


@cache
def truth() -> tuple[float, float]:
    """|G|^2 and tr(Sigma), from the gradient of each sample of the data by itself."""
    with tempfile.TemporaryDirectory() as folder, EventWriter(Path(folder) / "rank-0.jsonl", 0) as events:
        one = job(strategy="single", world_size=1, record=ss.Record())
        trainer = Trainer(one, RankContext(0, 1, torch.device("cpu"), Meter(), events), Path(folder))
    parameters = {name: p.detach() for name, p in trainer.model.named_parameters()}

    def loss(parameters, x, y):
        return torch.nn.functional.cross_entropy(
            functional_call(trainer.model, parameters, (x[None],)), y[None]
        )

    inputs, targets = trainer.data.train.batch(torch.arange(len(trainer.data.train)))
    each = vmap(grad(loss), in_dims=(None, 0, 0))(parameters, inputs, targets)
    flat = torch.cat([g.reshape(len(inputs), -1).double() for g in each.values()], dim=1)
    return float(flat.mean(0).square().sum()), float(flat.var(0).sum())


def measured(ranks) -> tuple[np.ndarray, np.ndarray, int]:
    """Squared norms of small batches (mean over ranks) and of the large one, step by step, and the small batch."""
    noise = [[event["noise"] for event in events] for events in ranks]
    small = np.mean([[n["small_square"] for n in row] for row in noise], axis=0)
    large = np.array([[n["large_square"] for n in row] for row in noise])
    assert (large == large[0]).all()  # all ranks hold the same mean
    return small, large[0], noise[0][0]["small_batch"]


def check(ranks, small_batch: int) -> None:
    square, trace = truth()
    small, large, batch = measured(ranks)
    assert batch == small_batch
    found = estimate(small, large, small_batch=batch, large_batch=BATCH)
    assert found.critical_batch == pytest.approx(trace / square, rel=0.2)
    assert found.gradient_square == pytest.approx(square, rel=0.2)
    assert found.trace == pytest.approx(trace, rel=0.1)
    assert found.low < trace / square < found.high


@pytest.mark.slow
@pytest.mark.parametrize("pools", [2, 4], indirect=True, ids="{0} ranks".format)
@pytest.mark.parametrize("compression", ["none", "int8", "topk"])
@pytest.mark.parametrize("strategy", ["all-reduce", "ring"])
def test_it_is_that_of_all_single_gradients(pool, tmp_path, strategy, compression):
    ours = job(strategy=strategy, world_size=pool.world_size, compression=compression)
    check(pool.run(steps_of(ours), tmp_path), BATCH // pool.world_size)


@pytest.mark.parametrize("pools", [2], indirect=True, ids="{0} ranks".format)
class TestOnTwoRanks:
    @pytest.mark.parametrize(
        ("strategy", "compression"), [("zero-1", "none"), ("zero-3", "none"), ("zero-2", "int8")]
    )
    def test_shards_tell_it_too(self, pool, tmp_path, strategy, compression):
        batch = ss.Batch(BATCH, micro_batch=16)
        ours = job(strategy=strategy, world_size=2, compression=compression, batch=batch)
        check(pool.run(steps_of(ours), tmp_path), 16)

    def test_without_compression_it_is_exact_and_sends_nothing(self, pool, tmp_path):
        ours = job(strategy="ring", world_size=2, steps=3)
        ranks = pool.run(steps_of(ours), tmp_path)
        small, large, _ = measured(ranks)
        split = job(strategy="single", world_size=1, steps=3, batch=ss.Batch(BATCH, micro_batch=32))
        as_one, mean_as_one, _ = measured([alone(split)])
        assert small == pytest.approx(as_one, rel=1e-5)
        assert large == pytest.approx(mean_as_one, rel=1e-5)
        assert set(ranks[0][0]["traffic"]) == {"ring_all_reduce"}

    @pytest.mark.parametrize("compression", ["int8", "topk", "onebit-adam"])
    def test_compressed_only_a_sketch_is_added_to_the_traffic(self, pool, tmp_path, compression):
        optimizer = ss.Optimizer("adamw", lr=1e-3) if compression == "onebit-adam" else STANDSTILL
        ours = job(strategy="ring", world_size=2, compression=compression, optimizer=optimizer, steps=6)
        (event, *_), _ = pool.run(steps_of(ours), tmp_path)
        (plain, *_), _ = pool.run(steps_of(ours.replace(record=ss.Record())), tmp_path)
        sketch = event["traffic"].pop("noise_scale")
        assert event["traffic"] == plain["traffic"]
        assert sketch["sent_bytes"] == sketch["received_bytes"] == 4 * SIZE
        assert "noise" not in plain

    def test_clipping_feedback_and_loss_scaling_do_not_show(self, pool, tmp_path):
        ours = job(strategy="ring", world_size=2, steps=4)
        small, large, _ = measured(pool.run(steps_of(ours), tmp_path))
        clipped = measured(pool.run(steps_of(ours.replace(clip_norm=1e-3)), tmp_path))
        assert clipped[0] == pytest.approx(small)
        assert clipped[1] == pytest.approx(large)
        scaled = measured(pool.run(steps_of(ours.replace(precision="fp16-mixed")), tmp_path))
        assert scaled[0] == pytest.approx(small, rel=0.02)
        assert scaled[1] == pytest.approx(large, rel=0.02)
        with_feedback = ss.Compression("topk", ratio=0.01, feedback=True)
        packed = measured(pool.run(steps_of(ours.replace(compression=with_feedback)), tmp_path))
        assert packed[0] == pytest.approx(small)
        assert packed[1] == pytest.approx(large, rel=5 * (2 / SIZE) ** 0.5)

    def test_it_can_be_measured_now_and_then_and_training_is_the_same(self, pool, tmp_path):
        ours = job(strategy="ring", world_size=2, steps=4, record=ss.Record(noise_scale=True, noise_every=2),
                   compression="topk", optimizer="adamw")  # fmt: skip
        (events, _), (plain, _) = (
            pool.run(steps_of(ours.replace(record=record)), tmp_path) for record in (ours.record, ss.Record())
        )
        assert [event["step"] for event in events if "noise" in event] == [2, 4]
        assert [event["loss"] for event in events] == [event["loss"] for event in plain]


def test_a_gradient_that_overflows_is_no_measurement():
    split = ss.Batch(BATCH, micro_batch=16)
    ours = job(strategy="single", world_size=1, steps=1, batch=split, precision="fp16-mixed")
    with tempfile.TemporaryDirectory() as folder, EventWriter(Path(folder) / "rank-0.jsonl", 0) as events:
        trainer = Trainer(ours, RankContext(0, 1, torch.device("cpu"), Meter(), events), Path(folder))
        trainer.strategy.precision.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**127)
        trainer.take_step(1)
        (event,) = [e for e in map(json.loads, events.path.read_text().splitlines()) if e["event"] == "step"]
    assert event["skipped"]
    assert "noise" not in event


def test_off_it_leaves_the_model_alone():
    with tempfile.TemporaryDirectory() as folder, EventWriter(Path(folder) / "rank-0.jsonl", 0) as events:
        one = job(strategy="single", world_size=1, record=ss.Record())
        trainer = Trainer(one, RankContext(0, 1, torch.device("cpu"), Meter(), events), Path(folder))
    assert trainer.strategy.noise is None
    assert not any(p._backward_hooks for p in trainer.model.parameters())


def test_parts_without_targets_are_left_out_of_the_mean(tmp_path):
    with EventWriter(tmp_path / "rank-0.jsonl", 0) as events:
        ours = job(strategy="single", world_size=1, batch=ss.Batch(BATCH, micro_batch=BATCH // 4))
        noise = GradientNoise(ours, RankContext(0, 1, torch.device("cpu"), Meter(), events))
        noise.begin(1)
        gradient = torch.full((4,), 1.5)
        for weight in (2.0, 0.0, 2.0, 0.0):
            noise.begin_part(weight)
            noise.measure("weight", gradient * weight / 4)
        sample = noise.finish([gradient], loss_scale=None, copies=None)
    assert sample.small_square == pytest.approx(float(gradient.square().sum()))
