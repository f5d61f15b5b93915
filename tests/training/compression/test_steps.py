"""Methods that work over several steps: 1-bit Adam and LAMB, and local SGD, on real ranks."""

from __future__ import annotations

import math
from copy import deepcopy
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch

import shardscope as ss
from conformance.compressor import (
    SHAPES,
    CompressorConformance,
    awkward_sizes,
    gradients,
    make,
    sent_bytes,
)
from conformance.ranks import RankPool
from shardscope.analytic.communication import stepwise_bytes
from shardscope.errors import SpecError
from shardscope.methods.compressors.onebit_adam._torch import OneBit
from shardscope.methods.compressors.sign._torch import BlockSign
from shardscope.methods.optimizers.lamb._torch_frozen import FreezableLamb
from shardscope.training.compression import NotFinite
from shardscope.training.context import RankContext
from shardscope.training.evaluate import evaluate
from shardscope.training.trainer import Trainer
from training.compression.stepwise import FrozenAdam, FrozenLamb, Replica, Verbatim, split, start

STEPS = 8
"""Of the ten of the conformance job, whose warm-up is five."""
SGD = ss.Optimizer("sgd", lr=0.05)
MOMENTUM = ss.Optimizer("sgd", lr=0.05, momentum=0.9)


class TestSteps(CompressorConformance):
    """What the class asks for, with an optimizer that takes its steps in between."""

    methods: ClassVar = [
        ss.Compression("onebit-adam"),
        ss.Compression("onebit-lamb", block=64),
        ss.Compression("local-sgd", every=2),
    ]

    def test_all_ranks_end_with_the_same_bits(
        self, compression: ss.Compression, pool: RankPool, tmp_path: Path
    ) -> None:
        def body(context: RankContext) -> torch.Tensor:
            replica = Replica(compression, context)
            for step in range(1, STEPS + 1):
                replica.step(step, gradients(context.rank, step), first=3 if step > 6 else 0)
            return replica.settled()

        first, *others = pool.run(body, tmp_path)
        assert all(torch.equal(first, other) for other in others)
        assert torch.isfinite(first).all()
        assert not torch.equal(first, start())

    def test_the_wire_carries_what_the_formula_says(
        self, compression: ss.Compression, pool: RankPool, tmp_path: Path
    ) -> None:
        def body(context: RankContext) -> list[int]:
            replica = Replica(compression, context)
            context.meter.drain()
            sent = []
            for step in range(1, STEPS + 1):
                replica.step(step, gradients(context.rank, step))
                sent.append(sent_bytes(context))
            return sent

        rows = [
            stepwise_bytes(compression, [SHAPES], pool.world_size, step=step, steps=10).tolist()
            for step in range(1, STEPS + 1)
        ]
        assert pool.run(body, tmp_path) == [list(sent) for sent in zip(*rows, strict=True)]

    def test_buckets_of_awkward_sizes_meet(
        self, compression: ss.Compression, pool: RankPool, tmp_path: Path
    ) -> None:
        def body(context: RankContext) -> list[torch.Tensor]:
            ended = []
            for size in awkward_sizes(make(compression, context), context.world_size):
                shapes = [(size,)]
                replica = Replica(compression, context, shapes=shapes)
                for step in range(1, 7):  # the last one is past the warm-up
                    replica.step(step, gradients(context.rank, step, shapes))
                ended.append(replica.settled())
            return ended

        for first, *others in zip(*pool.run(body, tmp_path), strict=True):
            assert first.isfinite().all()
            assert all(torch.equal(first, other) for other in others)

    def test_zeros_stay_zeros(self, compression: ss.Compression, pool: RankPool, tmp_path: Path) -> None:
        def body(context: RankContext) -> list[torch.Tensor]:
            replica = Replica(compression, context)
            return [replica.step(step, torch.zeros_like(start())) for step in range(1, STEPS + 1)]

        for flats in pool.run(body, tmp_path):
            assert not any(flat.any() for flat in flats)

    @pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
    def test_what_is_not_finite_is_refused_by_name(
        self, compression: ss.Compression, bad: float, pool: RankPool, tmp_path: Path
    ) -> None:
        def body(context: RankContext) -> list[str]:
            replica = Replica(compression, context)
            messages = []
            for step in (1, 6, 7):
                broken = gradients(context.rank, step)
                broken[33 * 17 + 2] = bad  # in the second tensor
                try:
                    replica.step(step, broken)
                except NotFinite as error:
                    messages.append(str(error))
                replica.step(step, gradients(context.rank, step))
            return messages

        for messages in pool.run(body, tmp_path):
            assert len(messages) == 3
            assert all("'p1'" in message and compression.name in message for message in messages)

    @pytest.mark.parametrize("saved_after", [3, 5, 7])
    def test_what_is_remembered_survives_a_restart(
        self, compression: ss.Compression, saved_after: int, pool: RankPool, tmp_path: Path
    ) -> None:
        def body(context: RankContext) -> tuple[torch.Tensor, torch.Tensor]:
            first, second = Replica(compression, context), Replica(compression, context)
            for step in range(1, saved_after + 1):
                first.step(step, gradients(context.rank, step))
            first.settled()
            second.compressor.load_state_dict(deepcopy(first.compressor.state_dict()))
            second.optimizer.load_state_dict(deepcopy(first.optimizer.state_dict()))
            for name, weight in first.weights.items():
                second.weights[name].data.copy_(weight.detach())
            for replica in (first, second):
                for step in (saved_after + 1, saved_after + 2):
                    replica.step(step, gradients(context.rank, step))
            return first.settled(), second.settled()

        for went_on, resumed in pool.run(body, tmp_path):
            assert torch.equal(went_on, resumed)


@pytest.mark.ranks(2)
@pytest.mark.parametrize(
    ("first", "saved_after", "then", "as_if"), [(5, 7, 8, 5), (5, 5, 8, 8), (8, 6, 5, 6)]
)
@pytest.mark.parametrize("name", ["onebit-adam", "onebit-lamb"])
def test_a_job_of_another_length_leaves_a_frozen_moment_as_it_is(
    name: str, first: int, saved_after: int, then: int, as_if: int, pool: RankPool, tmp_path: Path
) -> None:
    """A longer or shorter job has another warm-up: what is frozen stays so, and what is not is frozen in time."""

    def replica(context: RankContext, warmup: int) -> Replica:
        return Replica(
            ss.Compression(name), context, compressor=OneBit(name, BlockSign(64), warmup_steps=warmup)
        )

    def body(context: RankContext) -> tuple[torch.Tensor, torch.Tensor]:
        before, after, whole = replica(context, first), replica(context, then), replica(context, as_if)
        for step in range(1, saved_after + 1):
            for each in (before, whole):
                each.step(step, gradients(context.rank, step))
        after.compressor.load_state_dict(deepcopy(before.compressor.state_dict()))
        after.optimizer.load_state_dict(deepcopy(before.optimizer.state_dict()))
        for weight, saved in zip(after.weights.values(), before.weights.values(), strict=True):
            weight.data.copy_(saved.detach())
        for step in range(saved_after + 1, 12):
            for each in (after, whole):
                each.step(step, gradients(context.rank, step))
        return after.flat(), whole.flat()

    for resumed, whole in pool.run(body, tmp_path):
        assert torch.equal(resumed, whole)


def distance(ours: torch.Tensor, theirs: list[torch.Tensor]) -> float:
    """How far apart two runs from the same start have ended, relative to the way gone."""
    end = torch.cat([weight.reshape(-1) for weight in theirs])
    return float((ours - end).norm() / (end - start()).norm())


@pytest.mark.parametrize("name", ["onebit-adam", "onebit-lamb"])
def test_without_loss_in_its_code_it_is_the_frozen_optimizer_on_one_process(
    name: str, pool: RankPool, tmp_path: Path
) -> None:
    warmup, steps, lr = 4, 12, 0.05
    optimizer = ss.Optimizer({"onebit-adam": "adamw", "onebit-lamb": "lamb"}[name], lr=lr)

    def body(context: RankContext) -> torch.Tensor:
        verbatim = OneBit(name, Verbatim(), warmup)
        replica = Replica(ss.Compression(name), context, optimizer=optimizer, compressor=verbatim)
        for step in range(1, steps + 1):
            replica.step(step, gradients(context.rank, step))
        return replica.flat()

    of = {"onebit-adam": FrozenAdam, "onebit-lamb": FrozenLamb}[name]
    reference, moving = (of(list(split(start())), frozen_after, lr=lr) for frozen_after in (warmup, steps))
    for step in range(1, steps + 1):
        mean = sum(gradients(rank, step) for rank in range(pool.world_size)) / pool.world_size
        reference.step(list(split(mean)))
        moving.step(list(split(mean)))
    end = pool.run(body, tmp_path)[0]
    assert distance(end, reference.weights) < 1e-5
    assert distance(end, moving.weights) > 1e-2  # the freeze is there to be seen


@pytest.mark.parametrize("first_gradient", [1, 3, 5])
def test_a_bias_that_starts_at_zero_takes_no_part_in_the_averaged_ratio_until_it_has_a_norm(
    first_gradient: int,
) -> None:
    warmup, steps, lr = 4, 12, 0.05
    shapes = [(8, 4), (4,)]
    values = [piece.clone() for piece in split(gradients(99, shapes=shapes), shapes)]
    values[1].zero_()
    params = [torch.nn.Parameter(value.clone()) for value in values]
    optimizer = FreezableLamb(params, lr=lr)
    reference = FrozenLamb([value.clone() for value in values], warmup, lr=lr)
    for step in range(1, steps + 1):
        grads = [piece.clone() for piece in split(gradients(0, step, shapes=shapes), shapes)]
        if step < first_gradient:
            grads[1].zero_()
        reference.step(grads)
        if step == warmup + 1:
            optimizer.freeze(warmup)
        for param, grad in zip(params, grads, strict=True):
            param.grad = grad
            if step > warmup:
                optimizer.advance_(param, grad)
        optimizer.step()
    for param, theirs in zip(params, reference.weights, strict=True):
        torch.testing.assert_close(param.detach().double(), theirs, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("name", ["onebit-adam", "onebit-lamb"])
def test_elements_that_never_had_a_gradient_do_not_drift(name: str, pool: RankPool, tmp_path: Path) -> None:
    optimizer = ss.Optimizer({"onebit-adam": "adamw", "onebit-lamb": "lamb"}[name], weight_decay=0.0)

    def body(context: RankContext) -> torch.Tensor:
        replica = Replica(ss.Compression(name, block=64), context, optimizer=optimizer)
        for step in range(1, 13):
            flat = gradients(context.rank, step)
            flat[:170] = 0.0  # ten rows of the first tensor, in blocks with others
            replica.step(step, flat)
        return replica.flat()

    end = pool.run(body, tmp_path)[0]
    assert torch.equal(end[:170], start()[:170])
    assert (end[170:] != start()[170:]).float().mean() > 0.99


def test_weights_with_hardly_a_gradient_do_not_run_away(pool: RankPool, tmp_path: Path) -> None:
    steps, lr = 12, 1e-3

    def body(context: RankContext) -> torch.Tensor:
        optimizer = ss.Optimizer("adamw", lr=lr, weight_decay=0.0)
        replica = Replica(ss.Compression("onebit-adam", block=64), context, optimizer=optimizer)
        for step in range(1, steps + 1):
            flat = gradients(context.rank, step)
            flat[:170] *= 1e-5  # ten rows of the first tensor, in blocks with others
            replica.step(step, flat)
        return replica.flat()

    moved = (pool.run(body, tmp_path)[0] - start()).abs()
    assert float(moved.max()) < 10 * lr * steps  # by the root of their own second moment, 10**4 times that


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_local_sgd_is_so_many_models_averaged(momentum: float, pool: RankPool, tmp_path: Path) -> None:
    every, steps = 3, 8  # the last average is out of turn

    def pull(rank: int, weights: torch.Tensor) -> torch.Tensor:
        """The gradient of a quadratic bowl of this rank's own."""
        return (rank + 1) * (weights - gradients(rank, 7))

    def body(context: RankContext) -> torch.Tensor:
        rate = ss.Optimizer("sgd", lr=0.05, momentum=momentum)
        replica = Replica(ss.Compression("local-sgd", every=every), context, optimizer=rate)
        for step in range(1, steps + 1):
            replica.step(step, pull(context.rank, replica.flat()))
        return replica.settled()

    models = [start().double() for _ in range(pool.world_size)]
    velocities = [torch.zeros_like(model) for model in models]
    for step in range(1, steps + 1):
        for rank, model in enumerate(models):
            velocities[rank] = momentum * velocities[rank] + pull(rank, model)
            models[rank] = model - 0.05 * velocities[rank]
        if step % every == 0 or step == steps:
            mean = torch.stack(models).mean(dim=0)
            models = [mean.clone() for _ in models]
    assert distance(pool.run(body, tmp_path)[0], [models[0]]) < 1e-5


def job(**changes: Any) -> ss.Job:
    """The small network on digits."""
    fields: dict[str, Any] = {"model": "mlp", "data": "digits", "batch": 48, "steps": 10, "seed": 1}
    return ss.Job(**{**fields, **changes})


def trained(jobs: list[ss.Job], steps: int, pool: RankPool, folder: Path) -> list[tuple[torch.Tensor, float]]:
    """Parameters and test loss of each job after so many steps."""

    def body(context: RankContext) -> list[tuple[torch.Tensor, float]]:
        results = []
        for one in jobs:
            trainer = Trainer(one, context, context.events.path.parent)
            for step in range(1, steps + 1):
                trainer.take_step(step)
            loss = evaluate(trainer.strategy, trainer.data.test, trainer.loss_function, trainer._place)[
                "loss"
            ]
            parameters = trainer.strategy.full_parameters().values()
            flat = torch.cat([p.detach().reshape(-1) for p in parameters])
            trainer.strategy.close()
            results.append((flat, loss))
        return results

    results: list[tuple[torch.Tensor, float]] = pool.run(body, folder)[0]
    return results


@pytest.mark.parametrize(("name", "optimizer"), [("onebit-adam", "adamw"), ("onebit-lamb", "lamb")])
def test_the_warmup_is_the_uncompressed_run(
    name: str, optimizer: str, pool: RankPool, tmp_path: Path
) -> None:
    batch = ss.Batch(48, micro_batch=48 // pool.world_size // 2)
    both = [
        job(world_size=pool.world_size, batch=batch, optimizer=optimizer, compression=compression)
        for compression in ("none", ss.Compression(name, warmup_steps=6))
    ]
    apart = lambda a, b: float((a - b).norm() / a.norm())
    (plain, _), (compressed, _) = trained(both, 6, pool, tmp_path)
    # two ranks add in one order only; more add buckets that are cut otherwise in another one in the first step
    assert torch.equal(plain, compressed) if pool.world_size == 2 else apart(plain, compressed) < 1e-6
    (plain, _), (compressed, _) = trained(both, 8, pool, tmp_path)
    assert apart(plain, compressed) > 1e-4


@pytest.mark.parametrize("strategy", ["ring", "all-reduce"])
def test_local_sgd_at_every_step_is_plain_sgd(strategy: str, pool: RankPool, tmp_path: Path) -> None:
    batch = ss.Batch(48, micro_batch=48 // pool.world_size // 2)
    both = [
        job(
            world_size=pool.world_size, strategy=strategy, batch=batch, precision="fp64", optimizer=SGD,
            compression=compression,
        )
        for compression in ("none", ss.Compression("local-sgd", every=1))
    ]  # fmt: skip
    (plain, _), (local, _) = trained(both, 10, pool, tmp_path)
    assert float((plain - local).norm() / plain.norm()) < 1e-12


@pytest.mark.ranks(2)  # learning is the slow part, and no other at 3 and 4 ranks
@pytest.mark.parametrize(
    ("strategy", "compression", "optimizer"),
    [
        ("all-reduce", ss.Compression("onebit-adam"), ss.Optimizer("adamw", lr=2e-3)),
        ("ring", ss.Compression("onebit-lamb"), ss.Optimizer("lamb", lr=1e-2)),
        ("all-reduce", ss.Compression("local-sgd", every=4), MOMENTUM),
    ],
    ids=["onebit-adam", "onebit-lamb", "local-sgd"],
)
def test_it_learns_about_as_well_as_without(
    strategy: str, compression: ss.Compression, optimizer: ss.Optimizer, pool: RankPool, tmp_path: Path
) -> None:
    both = [
        job(world_size=2, steps=60, strategy=strategy, optimizer=optimizer, compression=method)
        for method in ("none", compression)
    ]
    (_, plain), (_, compressed) = trained(both, 60, pool, tmp_path)
    assert plain < 0.5  # from 2.3
    assert compressed < plain + 0.1


@pytest.mark.parametrize("name", ["onebit-adam", "onebit-lamb"])
@pytest.mark.parametrize("warmup_steps", [0, 4, 10])
def test_a_warmup_of_no_use_is_refused(name: str, warmup_steps: int) -> None:
    optimizer = {"onebit-adam": "adamw", "onebit-lamb": "lamb"}[name]
    with pytest.raises(SpecError, match=rf"warmup_steps={warmup_steps} with steps=10 .* use 5 to 9"):
        job(optimizer=optimizer, compression=ss.Compression(name, warmup_steps=warmup_steps))

    with pytest.raises(SpecError, match="steps=5 is too few"):
        job(steps=5, optimizer=optimizer, compression=name)


def test_clipping_inside_lamb_is_refused() -> None:
    with pytest.raises(SpecError, match="max_grad_norm='off'"):
        job(optimizer=ss.Optimizer("lamb", variant="apex"), compression="onebit-lamb")


def test_the_formula_holds_where_all_steps_are_alike() -> None:
    int8 = ss.Compression("int8")
    for step in (1, 10):
        assert (stepwise_bytes(int8, [SHAPES], 2, step=step, steps=10) == int8.bucket_bytes(SHAPES, 2)).all()


@pytest.mark.sampled
@pytest.mark.parametrize(("before", "until", "then", "ends"), [(30, 8, 60, 6), (60, 8, 30, 8)])
def test_what_a_resumed_run_sends_is_foretold_by_when_its_moment_was_frozen(
    before: int, until: int, then: int, ends: int
) -> None:
    """Warm-ups are a fifth of the job's steps: what is frozen stays so, and what is late is frozen at once."""
    whole = job(
        steps=before, until=until, strategy="ring", world_size=2, optimizer="adamw", compression="onebit-adam"
    )
    first = ss.launch(whole).wait(60)
    second = ss.launch(whole.replace(steps=then, until=14), resume=first).wait(60)
    (went_on,) = [event for event in second.events("resume") if event["rank"] == 0]
    assert went_on["warmup_ended"] == ends
    buckets = ss.predict(whole).step.buckets(whole.strategy.bucket_mb)
    for run, told in ((first, None), (second, went_on["warmup_ended"])):
        for event in run.events("step"):
            sent = stepwise_bytes(
                run.job.compression, buckets, 2, step=event["step"], steps=run.job.steps, warmup_ended=told
            )
            own = [row for name, row in event["traffic"].items() if name.startswith(("ring", "packet"))]
            assert sum(row["sent_bytes"] for row in own) == sent[event["rank"]]
