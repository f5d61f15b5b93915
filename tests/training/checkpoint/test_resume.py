"""What goes on from a checkpoint: random numbers of every kind, and jobs that have little or nothing left to train."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import shardscope as ss
from conformance.alone import Never, parameters_of, trainer_in
from conformance.ranks import RankPool
from conformance.runs import small_job
from conformance.sharded import jagged
from shardscope.errors import CheckpointError
from shardscope.training.context import RankContext
from shardscope.training.trainer import Trainer


class Noisy(nn.Module):
    """Draws from every generator that a rank has, in training and, in another number, in evaluation."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(64, 10)

    def forward(self, images: Tensor) -> Tensor:
        drawn = [
            (random.random(), random.gauss(0.0, 1.0), *np.random.uniform(size=1), *np.random.normal(size=1))  # noqa: NPY002
            for _ in range(1 if self.training else 2)
        ]
        return self.head(images.flatten(1)) * (1 + 0.1 * float(sum(drawn[0]))) + torch.randn(1)


def job_of(context: RankContext, **changes: Any) -> ss.Job:
    fields: dict[str, Any] = {"model": jagged, "batch": 24, "steps": 6, "checkpoint": ss.Checkpoint(every=3)}
    return small_job(world_size=context.world_size, **{**fields, **changes})


def trained(job: ss.Job, context: RankContext, folder: Path, after: Path | None = None) -> Trainer:
    folder.mkdir(exist_ok=True)
    trainer = Trainer(job, context, folder)
    if after is not None:
        trainer.resume(after)
    assert trainer.train(Never()) == "completed"
    return trainer


def resume_notes(path: Path) -> list[str]:
    told = [json.loads(line) for line in path.read_text().splitlines()]
    return next(event["notes"] for event in reversed(told) if event["event"] == "resume")


@pytest.mark.parametrize("eval_every", [None, 1])
def test_every_random_generator_of_every_rank_goes_on(
    pool: RankPool, tmp_path: Path, eval_every: int | None
) -> None:
    def body(context: RankContext) -> bool:
        job = job_of(context, model=Noisy, eval_every=eval_every)
        whole = parameters_of(trained(job, context, tmp_path / "whole"))
        torch.manual_seed(9)
        random.seed(9)
        np.random.seed(9)  # noqa: NPY002
        rest = trained(job, context, tmp_path / "rest", tmp_path / "whole/checkpoints/step-3")
        unwatched = trained(job.replace(eval_every=None), context, tmp_path / "unwatched")
        return all(
            torch.equal(a, b) and torch.equal(a, c)
            for a, b, c in zip(whole, parameters_of(rest), parameters_of(unwatched), strict=True)
        )

    assert all(pool.run(body, tmp_path))


def test_a_job_with_nothing_left_to_train_ends_with_its_parameters(pool: RankPool, tmp_path: Path) -> None:
    record = ss.Record(parameters=True)

    def body(context: RankContext) -> None:
        whole = job_of(context, record=record)
        trained(whole, context, tmp_path / "whole")
        trained(whole, context, tmp_path / "again", tmp_path / "whole/checkpoints")
        with pytest.raises(
            CheckpointError, match="is from step 6, but this job ends after step 5; raise its steps"
        ):
            trained(whole.replace(steps=5), context, tmp_path / "fewer", tmp_path / "whole/checkpoints")

    pool.run(body, tmp_path)
    before, after = (np.load(tmp_path / name / "parameters.npz") for name in ("whole", "again"))
    assert all(np.array_equal(before[key], after[key]) for key in before.files)
    told = [json.loads(line) for line in (tmp_path / "rank-0.jsonl").read_text().splitlines()]
    notes = [event["notes"] for event in told if event["event"] == "resume"]
    assert "from the job's last step 6: nothing was left to train" in notes[0][-1]


@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
def test_gossip_goes_on_from_a_model_that_all_ranks_share(
    pool: RankPool, tmp_path: Path, optimizer: str
) -> None:
    def body(context: RankContext) -> tuple[list[Tensor], list[Tensor], list[Any]]:
        ring = job_of(context, optimizer=optimizer, steps=3)
        one = trained(ring, context, tmp_path / "ring")
        gossip = Trainer(ring.replace(strategy="gossip", steps=6), context, tmp_path)
        gossip.resume(tmp_path / "ring/checkpoints")
        moments = [gossip.optimizer.state[p].get("exp_avg") for p in gossip.model.parameters()]
        theirs = [one.optimizer.state[p].get("exp_avg") for p in one.model.parameters()]
        same = [a is b or torch.equal(a, b) for a, b in zip(moments, theirs, strict=True)]
        found = parameters_of(gossip)
        assert all(gossip.take_step(step) is not None for step in (4, 5))
        return parameters_of(one), found, same

    for before, after, same in pool.run(body, tmp_path):
        assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
        assert all(same)


def test_the_mean_of_gossiping_ranks_goes_on_elsewhere_and_says_that_moments_do_not(
    pool: RankPool, tmp_path: Path
) -> None:
    def body(context: RankContext) -> tuple[list[Tensor], list[Tensor]]:
        gossip = job_of(context, strategy="gossip", steps=3)
        mean = list(trained(gossip, context, tmp_path / "gossip").strategy.full_parameters().values())
        ring = Trainer(job_of(context), context, tmp_path)
        ring.resume(tmp_path / "gossip/checkpoints")
        return [tensor.clone() for tensor in mean], parameters_of(ring)

    for mean, found in pool.run(body, tmp_path):
        torch.testing.assert_close(found, mean)
    assert "from the mean, the optimizer state is reset" in resume_notes(tmp_path / "rank-0.jsonl")[0]


class Remembers(nn.Module):
    """Has state beside tensors."""

    def __init__(self, extra: object) -> None:
        super().__init__()
        self.head, self.extra = nn.Linear(64, 10), extra

    def forward(self, images: Tensor) -> Tensor:
        return self.head(images.flatten(1))

    def get_extra_state(self) -> object:
        return self.extra

    def set_extra_state(self, state: object) -> None:
        self.extra = state


@pytest.mark.parametrize(
    "extra", [3, 2**90, "word", float("inf"), b"\x00\xff", (1, [2.5, None]), {"a": torch.ones(2)}, [{3: (True,)}],
     np.int64(3), np.float64(0.5), np.arange(4.0).reshape(2, 2),
     [torch.ones(2), (torch.tensor(1.5, dtype=torch.bfloat16),)]]
)  # fmt: skip
def test_what_a_module_keeps_beside_tensors_goes_on_as_it_was(tmp_path: Path, extra: object) -> None:
    trainer_in(tmp_path / "one", model=lambda: Remembers(extra)).train(Never())
    empty = {"a": torch.zeros(2)} if isinstance(extra, dict) else None
    again = trainer_in(tmp_path / "again", model=lambda: Remembers(empty), steps=5)
    again.resume(tmp_path / "one/checkpoints")
    assert repr(again.model.extra) == repr(extra)


def test_what_only_a_pickle_could_hold_is_refused(tmp_path: Path) -> None:
    trainer = trainer_in(tmp_path, model=lambda: Remembers(random.Random(1)))
    with pytest.raises(
        CheckpointError, match="model._extra_state is a Random, which cannot be saved in a checkpoint"
    ):
        trainer.train(Never())
    assert '"step"' not in (tmp_path / "rank-0.jsonl").read_text(), "before anything is trained"


@pytest.mark.ranks(2)
def test_own_parameters_are_saved_again_where_nothing_was_left_to_train(
    pool: RankPool, tmp_path: Path
) -> None:
    def body(context: RankContext) -> list[dict[str, Tensor]]:
        job = job_of(context, strategy="ring", compression=ss.Compression("local-sgd", every=4), steps=3)
        one = trained(job, context, tmp_path / "one")
        then = Trainer(job, context, tmp_path)
        then.resume(tmp_path / "one/checkpoints")
        return [dict(run.strategy.compressor_state()) for run in (one, then)]

    for before, after in pool.run(body, tmp_path):
        assert before.keys() == after.keys()
        assert any(key.startswith("parameter.") for key in before)
        assert all(torch.equal(before[key], after[key]) for key in before)
