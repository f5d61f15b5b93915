"""A job trained in pieces ends where it ends in one, and what was changed between two pieces holds from there on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import shardscope as ss
from conformance.alone import Never, parameters_of
from conformance.ranks import RankPool
from conformance.runs import small_job
from conformance.sharded import jagged
from shardscope.training.context import RankContext
from shardscope.training.data import GlobalSampler
from shardscope.training.sharding import local
from shardscope.training.trainer import Trainer

pytestmark = pytest.mark.ranks(2)
TOPK = ss.Compression("topk", ratio=0.05)


def job_of(**changes: Any) -> ss.Job:
    fields: dict[str, Any] = {
        "model": jagged, "data": "digits", "strategy": "ring", "world_size": 2, "batch": 32, "steps": 9,
        "lr_schedule": ss.LRSchedule("cosine", warmup_steps=2), "record": ss.Record(memory_first=0, memory_every=None),
    }  # fmt: skip
    return ss.Job(**{**fields, **changes})


def train(job: ss.Job, context: RankContext, folder: Path, after: Path | None = None) -> Trainer:
    folder.mkdir(exist_ok=True)
    trainer = Trainer(job, context, folder)
    if after is not None:
        trainer.resume(after / "checkpoints")
    assert trainer.train(Never()) == "completed"
    return trainer


@pytest.mark.parametrize("strategy", ["ring", "all-reduce", "zero-1"])
@pytest.mark.parametrize("optimizer", ["adamw", "lamb"])
def test_a_job_in_pieces_ends_at_the_same_bits(
    pool: RankPool, tmp_path: Path, strategy: str, optimizer: str
) -> None:
    job = job_of(strategy=strategy, optimizer=optimizer, compression=TOPK)

    def body(context: RankContext) -> tuple[list[Tensor], list[Tensor], list[int]]:
        whole = train(job, context, tmp_path / "whole")
        first = train(job.replace(until=3), context, tmp_path / "0")
        assert sorted(path.name for path in (tmp_path / "0/checkpoints").iterdir()) == ["step-3"]
        second = train(job.replace(until=5), context, tmp_path / "1", tmp_path / "0")
        last = train(job, context, tmp_path / "2", tmp_path / "1")
        return (
            parameters_of(whole),
            parameters_of(last),
            [t.first_step for t in (whole, first, second, last)],
        )

    for whole, pieces, starts in pool.run(body, tmp_path):
        assert starts == [1, 1, 4, 6]
        assert all(torch.equal(a, b) for a, b in zip(whole, pieces, strict=True))


def test_until_lies_within_the_steps() -> None:
    with pytest.raises(ss.SpecError, match="until=11 is more than steps=10; use 1 to 10"):
        small_job(until=11)
    assert small_job(until=4).last_step == 4


# What goes on under other settings.


def resumed(
    pool: RankPool, tmp_path: Path, before: ss.Job, after: ss.Job, look: Any
) -> list[tuple[Any, Any, dict[str, Any]]]:
    """What `look` finds on each rank at the end of a run of `before`, and right after `after` resumed it."""

    def body(context: RankContext) -> tuple[Any, Any, dict[str, Any]]:
        saved = train(before, context, tmp_path / "before")
        (tmp_path / "after").mkdir(exist_ok=True)
        trainer = Trainer(after, context, tmp_path / "after")
        told: dict[str, Any] = {}
        emit = context.events.emit
        context.events.emit = lambda event, **fields: told.update({event: fields})  # type: ignore[method-assign]
        try:
            trainer.resume(tmp_path / "before/checkpoints")
        finally:
            context.events.emit = emit  # type: ignore[method-assign]
        found = look(saved), look(trainer), told["resume"]
        assert trainer.train(Never()) == "completed"
        return found

    ranks: list[tuple[Any, Any, dict[str, Any]]] = pool.run(body, tmp_path)
    return ranks


def settings_of(trainer: Trainer) -> dict[str, Any]:
    server = getattr(trainer.strategy, "server", trainer)
    optimizer = trainer.optimizer if server is None else server.optimizer
    return (
        {}
        if server is None
        else {key: value for key, value in optimizer.param_groups[0].items() if "param" not in key}
    )


CHANGES = {
    "adamw": {"lr": 5e-3, "weight_decay": 0.3, "betas": (0.8, 0.95), "eps": 1e-5},
    "lamb": {"lr": 5e-3, "weight_decay": 0.3, "betas": (0.8, 0.95), "clamp": 3.0},
    "lars": {"lr": 0.3, "weight_decay": 0.3, "momentum": 0.5, "trust_coefficient": 0.01},
    "nesterov": {"lr": 0.3, "weight_decay": 0.3, "momentum": 0.5},
}


@pytest.mark.parametrize(
    ("strategy", "name"),
    [
        *(("ring", name) for name in CHANGES),
        ("zero-1", "lamb"),
        ("zero-3", "lars"),
        ("parameter-server", "adamw"),
    ],
)
def test_the_settings_are_those_of_the_job_that_goes_on(
    pool: RankPool, tmp_path: Path, strategy: str, name: str
) -> None:
    before = job_of(strategy=strategy, until=3, optimizer=ss.Optimizer(name), lr_schedule="constant")
    after = before.replace(
        until=None, optimizer=ss.Optimizer(name, **CHANGES[name]), clip_norm=0.5,
        lr_schedule=ss.LRSchedule("linear", warmup_steps=5),
    )  # fmt: skip
    for had, has, told in resumed(pool, tmp_path, before, after, settings_of):
        if had:  # a worker beside a server updates nothing
            assert {key: has[key] for key in CHANGES[name]} == CHANGES[name]
            assert had["weight_decay"] != has["weight_decay"]
        assert told["notes"] == []


def test_changed_settings_move_the_weights_as_a_script_would(pool: RankPool, tmp_path: Path) -> None:
    """Oracle: torch's AdamW by hand, whose settings are changed after three steps of full-batch training."""
    before = job_of(until=3, optimizer=ss.Optimizer("adamw", lr=1e-2), lr_schedule="constant", batch=32)
    new = {"lr": 3e-3, "weight_decay": 0.4, "betas": (0.5, 0.9)}
    after = before.replace(until=None, optimizer=ss.Optimizer("adamw", **new))

    def body(context: RankContext) -> tuple[list[Tensor], list[Tensor]]:
        train(before, context, tmp_path / "before")
        last = train(after, context, tmp_path / "after", tmp_path / "before")
        (tmp_path / "script").mkdir(exist_ok=True)
        alone = Trainer(after.replace(strategy="all-reduce"), context, tmp_path / "script")
        optimizer = torch.optim.AdamW(alone.model.parameters(), lr=1e-2)
        for step in range(9):
            if step == 3:
                optimizer.param_groups[0].update(new)
            inputs, targets = alone.data.train.batch(alone.sampler.indices(step))
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(alone.model(inputs), targets).backward()
            optimizer.step()
        alone.strategy.close()
        return parameters_of(last), parameters_of(alone)

    for ours, script in pool.run(body, tmp_path):
        for a, b in zip(ours, script, strict=True):
            assert torch.allclose(a, b, rtol=1e-4, atol=1e-6)


def moments_of(trainer: Trainer) -> list[dict[str, Tensor]]:
    state = trainer.optimizer.state
    return [
        {key: local(value).clone() for key, value in state.get(p, {}).items() if isinstance(value, Tensor)}
        for group in trainer.optimizer.param_groups
        for p in group["params"]
    ]


@pytest.mark.parametrize(
    ("strategy", "first", "then", "note"),
    [
        ("zero-1", "adamw", "lamb", "lamb continues from the moments of adamw"),
        ("zero-1", "lars", "nesterov", "holds the velocity with rate and ratio inside of lars, but this job uses"),
        ("ring", "adamw", "nesterov", "moments of adamw, but this job uses the velocity of nesterov: the optimizer"),
        ("ring", "lars", "nesterov", "holds the velocity with rate and ratio inside of lars, but this job uses"),
        ("ring", "sgd", "lamb", "holds no state of sgd, but this job uses the moments of lamb: the optimizer"),
    ],
)  # fmt: skip
def test_another_optimizer_keeps_the_weights_and_what_it_also_carries(
    pool: RankPool, tmp_path: Path, strategy: str, first: str, then: str, note: str
) -> None:
    before = job_of(strategy=strategy, until=3, optimizer=first)
    after = before.replace(until=None, optimizer=then)

    def look(trainer: Trainer) -> tuple[list[Tensor], list[dict[str, Tensor]]]:
        return parameters_of(trainer), moments_of(trainer)

    for (weights, moments), (weights_now, moments_now), told in resumed(pool, tmp_path, before, after, look):
        assert all(torch.equal(a, b) for a, b in zip(weights, weights_now, strict=True))
        assert note in told["notes"][0]
        for had, has in zip(moments, moments_now, strict=True):
            if then == "lamb" and first == "adamw":
                assert all(torch.equal(had[key], has[key]) for key in ("step", "exp_avg", "exp_avg_sq"))
            else:
                assert not any(value.any() for value in has.values())


def owed_by(trainer: Trainer) -> dict[str, Tensor]:
    if trainer.strategy.compressor is None:
        return {}
    return {name: tensor.clone() for name, tensor in trainer.strategy.compressor_state().items()}


def test_the_same_method_keeps_what_it_owes_whatever_its_ratio(pool: RankPool, tmp_path: Path) -> None:
    before = job_of(until=3, compression=TOPK)
    after = before.replace(until=None, compression=TOPK.replace(ratio=0.5))
    for owed, owes, told in resumed(pool, tmp_path, before, after, owed_by):
        assert owed.keys() == owes.keys()
        assert all(torch.equal(owed[name], owes[name]) for name in owed)
        assert any(tensor.any() for tensor in owes.values())
        assert (told["compressor_state"], told["dropped"], told["notes"]) == ("its own", [], [])


def test_what_shares_owe_is_not_lost_when_packets_are_cut_otherwise(pool: RankPool, tmp_path: Path) -> None:
    method = ss.Compression("int4", feedback=True)
    before = job_of(until=3, compression=method)
    after = before.replace(until=None, compression=method.replace(exchange="gather"))
    ranks = resumed(pool, tmp_path, before, after, owed_by)
    for name in [name for name in ranks[0][1] if name.startswith("residual.")]:
        mean = sum(owed[name] for owed, _, _ in ranks) / 2
        for owed, _, _ in ranks:
            for piece, tensor in owed.items():
                if piece.startswith(f"share.{name.removeprefix('residual.')}@") and "padding" not in piece:
                    start = int(piece.rpartition("@")[2])
                    mean[start : start + tensor.numel()] += tensor
        for _, owes, told in ranks:
            assert torch.allclose(owes[name], mean, atol=1e-7)
            assert (told["compressor_state"], told["dropped"]) == ("the mean", [])


@pytest.mark.parametrize("then", ["int8", "none", "powersgd"])
def test_another_method_starts_with_nothing_and_says_so(pool: RankPool, tmp_path: Path, then: str) -> None:
    before = job_of(until=3, compression=TOPK)
    after = before.replace(until=None, compression=then)
    for owed, owes, told in resumed(pool, tmp_path, before, after, owed_by):
        assert owed
        assert not any(tensor.any() for tensor in owes.values())
        assert (told["compressor_state"], told["dropped"]) == ("nothing", ["residual"])
        assert told["notes"] == [
            "dropped compressor state (residual): the compression method is no longer topk"
        ]


def test_feedback_that_is_turned_off_is_dropped_and_said(pool: RankPool, tmp_path: Path) -> None:
    method = ss.Compression("int4", feedback=True)
    before = job_of(until=3, compression=method)
    after = before.replace(until=None, compression=ss.Compression("int4"))
    for _, owes, told in resumed(pool, tmp_path, before, after, owed_by):
        assert owes == {}
        assert told["dropped"] == ["residual", "share"]


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("method", "less"),
    [("adaptive-bits", {"budget": 2.5}), ("adaptive-rank", {"rank": 1}), ("powersgd", {"rank": 1})],
)
def test_a_smaller_allowance_holds_from_the_first_step(method: str, less: dict[str, Any]) -> None:
    """In bytes: those of a run that never had the larger one, before bits or ranks can have moved."""
    every = {"update_every": 2} if method.startswith("adaptive") else {}
    large, small = ss.Compression(method, **every), ss.Compression(method, **every, **less)
    job = small_job(steps=4, compression=small)
    half = ss.launch(job.replace(compression=large, until=3)).wait(60)
    rest = ss.launch(job, resume=half).wait(60)
    never = ss.launch(job.replace(until=3)).wait(60)
    if method != "adaptive-bits":  # its first steps have not looked at any gradient either
        never = ss.launch(job, resume=never).wait(60)
    sent, least, most = (int(run.metrics()["sent_bytes"].iloc[0]) for run in (rest, never, half))
    assert list(rest.metrics()["step"]) == [4]
    assert sent == least
    assert sent < most


@pytest.mark.slow
def test_a_one_bit_method_goes_on_only_from_itself_and_leaves_no_frozen_moments(
    pool: RankPool, tmp_path: Path
) -> None:
    onebit = ss.Compression("onebit-adam", warmup_steps=5)
    before = job_of(until=6, optimizer="adamw", compression=onebit)
    after = before.replace(until=None, compression="none")
    for had, has, told in resumed(pool, tmp_path, before, after, moments_of):
        assert all(moments["exp_avg"].any() for moments in had)
        assert not any(value.any() for moments in has for value in moments.values())
        assert (
            "the frozen moments of adamw, but this job uses the moments of adamw: the optimizer"
            in told["notes"][0]
        )
        assert told["dropped"] == ["frozen_after", "residual", "scale", "share"]
    half = ss.launch(small_job(steps=9, until=3)).wait(60)
    then = ss.launch(small_job(steps=9, compression=onebit), resume=half)
    match = "compression='onebit-adam' cannot resume a run that was trained with 'none'"
    with pytest.raises(ss.RunFailed, match=match):
        then.wait(60)


def test_what_is_frozen_stays_so_whatever_the_warm_up_would_be_now(pool: RankPool, tmp_path: Path) -> None:
    before = job_of(until=7, optimizer="adamw", compression=ss.Compression("onebit-adam", warmup_steps=5))
    after = before.replace(until=None, compression=ss.Compression("onebit-adam", warmup_steps=8))

    def body(context: RankContext) -> tuple[Any, Any, list[bool]]:
        first = train(before, context, tmp_path / "before")
        then = train(after, context, tmp_path / "after", tmp_path / "before")
        pairs = zip(moments_of(first), moments_of(then), strict=True)
        same = [torch.equal(a["exp_avg_sq"], b["exp_avg_sq"]) for a, b in pairs]
        return first.optimizer.frozen_after, then.optimizer.frozen_after, same

    for was, is_now, same in pool.run(body, tmp_path):
        assert (was, is_now) == (5, 5)
        assert all(same)


# Where the data go on.


def test_another_batch_goes_on_after_as_many_samples() -> None:
    before = GlobalSampler(100, 8, seed=3)
    taken = torch.cat([before.indices(step) for step in range(5)])
    after = GlobalSampler(100, 20, seed=3)
    after.resume(5, before.state_dict())
    assert after.samples_before(5) == 40
    epoch = torch.cat([taken, *(after.indices(step) for step in range(5, 8))])
    assert sorted(epoch.tolist()) == list(range(100))  # each row once, whichever batch it came in
    assert sorted(torch.cat([after.indices(step) for step in range(8, 13)]).tolist()) == list(range(100))
    back = GlobalSampler(100, 8, seed=3)
    back.resume(7, after.state_dict())
    assert torch.equal(back.indices(7), after.indices(7)[:8])
    assert (back.samples_before(7), back.samples_before(8)) == (80, 88)


def test_the_same_batch_goes_on_as_if_nothing_had_been() -> None:
    whole, rest = GlobalSampler(50, 8, seed=1), GlobalSampler(50, 8, seed=1)
    rest.resume(9, whole.state_dict())
    assert all(torch.equal(whole.indices(step), rest.indices(step)) for step in range(9, 30))


def test_a_run_with_another_batch_reads_on_and_says_how_far(pool: RankPool, tmp_path: Path) -> None:
    before = job_of(until=3, batch=32)
    after = before.replace(until=None, batch=64)

    def look(trainer: Trainer) -> Tensor:
        return trainer.sampler.indices(3)

    for would, goes, told in resumed(pool, tmp_path, before, after, look):
        assert torch.equal(would, goes[:32])
        assert len(goes) == 64
        assert told["samples"] == 96
