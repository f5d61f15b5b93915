"""What ranks tell of their layers: the paper's ratios, however the layers are spread, and not a bit of the training
moved by telling."""

from __future__ import annotations

import json
import math
from functools import cache
from pathlib import Path

import pytest
import torch

import shardscope as ss
from conformance.ranks import RankPool
from conformance.sharded import jagged
from conformance.strategy import relative_difference
from shardscope.methods.compressors.dgc._torch import MomentumCorrection
from shardscope.runlog.layers import layers_of
from shardscope.runlog.writer import EventWriter
from shardscope.training.compression.bucket import Bucket, BucketState
from shardscope.training.compression.memory import ErrorFeedback
from shardscope.training.context import RankContext
from shardscope.training.meter import Meter
from shardscope.training.trainer import Trainer
from training.optim.reference import LambReference, LarsReference, norm_of

OPTIMIZERS = {
    "lamb": ss.Optimizer("lamb", lr=5e-3, clamp=1.5),
    "lambc": ss.Optimizer("lamb", lr=5e-3, trust_clip=True, exclude="1d", eps=0.05),
    "lars": ss.Optimizer("lars", lr=2.0, trust_clip=True, trust_coefficient=1.0, weight_decay=0.01),
}
STEPS = 5
SPREAD = ("ring", "zero-1", "zero-2", "zero-3", "pipeline", "parameter-server")


def job(**changes) -> ss.Job:
    fields = {"model": jagged, "data": "digits", "batch": 48, "precision": "fp64", "steps": STEPS}
    return ss.Job(**{**fields, "record": ss.Record(layers_every=2), **changes})


def told(ours: ss.Job, after=lambda trainer, step: None, before=lambda trainer, step: None):
    """On each rank: its events on layers, and all parameters at the end."""

    def train(context: RankContext):
        written = len(context.events.path.read_text())
        trainer = Trainer(ours, context, context.events.path.parent)
        for step in range(1, ours.steps + 1):
            before(trainer, step)
            trainer.take_step(step)
            after(trainer, step)
        trainer.strategy.synchronize(ours.steps)
        parameters = {
            name: p.detach().double().clone() for name, p in trainer.strategy.full_parameters().items()
        }
        trainer.strategy.close()
        events = map(json.loads, context.events.path.read_text()[written:].strip().splitlines())
        return [event for event in events if event["event"] == "layers"], parameters

    return train


def alone(ours: ss.Job, folder: Path, **hooks):
    torch.set_num_threads(1)
    with EventWriter(folder / "rank-0.jsonl", 0) as events:
        return told(ours, **hooks)(RankContext(0, 1, torch.device("cpu"), Meter(), events))


@cache
def single(name: str):
    """The layers of the job on one process."""
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        events, _ = alone(job(strategy="single", world_size=1, optimizer=OPTIMIZERS[name]), Path(folder))
    return layers_of(events, OPTIMIZERS[name])


def reference(name: str, weights):
    settings = OPTIMIZERS[name].settings
    if name == "lars":
        keys = ("lr", "momentum", "weight_decay", "trust_coefficient", "trust_clip")
        return LarsReference(weights, **{key: settings[key] for key in keys})
    clamp = None if settings["clamp"] == "off" else settings["clamp"]
    own = {key: settings[key] for key in ("lr", "eps", "trust_clip")}
    return LambReference(weights, clamp=clamp, **own)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_ratios_are_those_of_the_papers_formula_from_each_steps_weights_and_gradients(
    name: str, tmp_path: Path
):
    excluded = OPTIMIZERS[name].exclude == "1d"
    expected, norms, state = [], [], {}

    def before(trainer, step):
        weights = [p.detach().clone() for p in trainer.model.parameters()]
        if not state:
            state["formula"] = reference(name, weights)
        norms.append([norm_of(weight) for weight in weights])

    def after(trainer, step):
        state["formula"].weights = state.pop("weights", state["formula"].weights)
        state["formula"].step([p.grad.clone() for p in trainer.model.parameters()])
        expected.append(list(state["formula"].ratios))
        # layers without a ratio move otherwise; the next step's ratios are to come from the weights as they are
        state["weights"] = [p.detach().clone() for p in trainer.model.parameters()]

    ours = job(strategy="single", world_size=1, optimizer=OPTIMIZERS[name])
    events, _ = alone(ours, tmp_path, before=before, after=after)
    assert [event["step"] for event in events] == [1, 2, 4]
    for event in events:
        at = event["step"] - 1
        assert event["lr"] == ours.optimizer.settings["lr"]
        assert len(event["layer"]) == 6
        told_layers = sorted(event["layer"])
        names = [name for name, _ in jagged().named_parameters()]
        assert told_layers == sorted(names)
        for layer, ratio, weight_norm, update_norm, bound in zip(
            *(event[key] for key in ("layer", "ratio", "weight_norm", "update_norm", "bound")), strict=True
        ):
            i = names.index(layer)
            if excluded and layer.endswith("bias"):
                assert (ratio, weight_norm, update_norm, bound) == (None, None, None, None)
                continue
            assert ratio == pytest.approx(expected[at][i], rel=1e-9)
            assert weight_norm == pytest.approx(norms[at][i], rel=1e-9)
            free = weight_norm / update_norm
            held = {
                "lamb": "clamp" if weight_norm > 1.5 else None,
                "lambc": "trust_clip" if free > 1 else None,
                "lars": "trust_clip" if free > 2.0 else None,
            }[name]
            assert bound == held
            if held is None:
                assert ratio == pytest.approx(free / (2.0 if name == "lars" else 1.0), rel=1e-9)
    bounds = [bound for event in events for bound in event["bound"]]
    assert any(bounds)
    assert None in bounds


@pytest.mark.parametrize("strategy", SPREAD)
@pytest.mark.parametrize(("pools", "name"), [(2, "lamb"), (3, "lars")], indirect=["pools"])
def test_layers_that_are_spread_over_ranks_tell_what_whole_ones_do(
    pool: RankPool, tmp_path: Path, name: str, strategy: str
):
    world_size = pool.world_size
    batch = ss.Batch(48, micro_batch=12 if strategy == "pipeline" else None)
    ours = job(strategy=strategy, world_size=world_size, optimizer=OPTIMIZERS[name], batch=batch)
    results = pool.run(told(ours), tmp_path)
    found = layers_of([event for events, _ in results for event in events], OPTIMIZERS[name])
    assert {series.layer for series in found.ratios} == {series.layer for series in single(name).ratios}
    for series in found.ratios:
        one = next(other for other in single(name).ratios if other.layer == series.layer)
        assert series.steps == one.steps == (1, 2, 4)
        assert series.bound == one.bound
        for column in ("lr", "ratio", "weight_norm", "update_norm"):
            assert getattr(series, column) == pytest.approx(getattr(one, column), rel=1e-8)
    if strategy not in ("pipeline", "parameter-server"):
        assert [bool(events) for events, _ in results] == [True] + [False] * (world_size - 1)


@pytest.mark.parametrize("pools", [2], indirect=True)
@pytest.mark.parametrize(
    "changes",
    [
        {"optimizer": "lamb", "compression": "topk", "strategy": "zero-2"},
        {
            "optimizer": "lamb",
            "compression": ss.Compression("onebit-lamb", warmup_steps=5),
            "precision": "fp32",
        },
        {"optimizer": "sgd", "compression": "dgc"},
        {"optimizer": "lars", "compression": ss.Compression("adaptive-rank", update_every=2)},
    ],
    ids=["topk", "onebit-lamb", "dgc", "adaptive-rank"],
)
def test_looking_moves_no_bit_of_the_training(pool: RankPool, tmp_path: Path, changes):
    ours = job(world_size=2, steps=8, **changes)
    looked = pool.run(told(ours.replace(record=ss.Record(layers_every=1))), tmp_path)
    blind = pool.run(told(ours.replace(record=ss.Record(layers_every=0))), tmp_path)
    assert [events for events, _ in blind] == [[], []]
    assert [event["step"] for event in looked[0][0]] == list(range(1, 9))
    for (_, ours_), (_, theirs) in zip(looked, blind, strict=True):
        assert relative_difference(ours_, theirs) == 0
    last = looked[0][0][-1]
    assert last["owed"]
    if (
        ours.compression.name == "onebit-lamb"
    ):  # the frozen optimizer needs no norms, and tells them all the same
        assert all(norm > 0 for norm in [*last["weight_norm"], *last["update_norm"]])


@pytest.mark.parametrize("pools", [2], indirect=True)
def test_what_is_owed_is_what_packets_have_left_out_beside_the_gradient(pool: RankPool, tmp_path: Path):
    """By hand, from the gradient of one rank alone: what top-k of a first step keeps back."""
    topk = ss.Compression("topk", ratio=0.1, selection="exact")
    ours = job(world_size=2, precision="fp32", steps=1, optimizer="sgd", compression=topk)
    for rank, (events, _) in enumerate(pool.run(told(ours), tmp_path)):
        gradients = _gradients_of(ours, rank, tmp_path)
        order = [row[1] for row in events[0]["owed"]]
        flat = torch.cat([gradients[name].flatten() for name in order])
        left = flat.clone()
        left[flat.abs().topk(math.ceil(0.1 * flat.numel())).indices] = 0
        pieces = left.split([gradients[name].numel() for name in order])
        for (kind, name, owed, gradient), piece in zip(events[0]["owed"], pieces, strict=True):
            assert kind == "residual"
            assert owed == pytest.approx(float(piece.norm()), rel=1e-4, abs=1e-7)
            assert gradient == pytest.approx(float(gradients[name].norm()), rel=1e-5)
        assert sum(owed for _, _, owed, _ in events[0]["owed"]) > 0


def _gradients_of(ours: ss.Job, rank: int, folder: Path) -> dict[str, torch.Tensor]:
    """This rank's own gradient at the start, by autograd alone."""
    with EventWriter(folder / "alone.jsonl", 0) as events:
        one = ours.replace(strategy="single", world_size=1, compression="none")
        trainer = Trainer(one, RankContext(0, 1, torch.device("cpu"), Meter(), events), folder)
        [(inputs, targets)] = trainer._micro_batches(1)
        half = slice(24 * rank, 24 * (rank + 1))
        torch.nn.functional.cross_entropy(trainer.model(inputs[half]), targets[half]).backward()
    return {name: p.grad.clone() for name, p in trainer.model.named_parameters()}


def test_exchanges_of_one_step_and_pieces_of_one_tensor_add_up():
    bucket = lambda flat: Bucket(
        ["a", "b@4", "a@padding"], [torch.Size([2]), torch.Size([1]), torch.Size([1])], flat, 1
    )
    memory = ErrorFeedback()
    memory.before(bucket(torch.tensor([9.0, 9.0, 9.0, 9.0])))
    assert memory.seen is None
    memory.watch(True)
    memory.before(bucket(torch.tensor([3.0, 4.0, 2.0, 7.0])))
    memory.before(bucket(torch.tensor([0.0, 12.0, 1.0, 7.0])))
    assert memory.seen == pytest.approx({"a": 169.0, "b": 5.0})
    assert memory.residual.squares == pytest.approx({"a": 12.0**2 + 25.0**2, "b": 12.0**2})
    memory.watch(False)
    assert memory.seen is None
    assert BucketState().squares == {}
    # deep gradient compression owes its momentum, not the bare gradient
    dgc = MomentumCorrection(0.5)
    dgc.watch(True)
    for _ in range(2):
        dgc.before(bucket(torch.tensor([3.0, 4.0, 0.0, 0.0])))
    assert dgc.seen["a"] == pytest.approx(25.0 + 1.5**2 * 25.0)
    assert set(dgc.owed) == {"unsent"}
