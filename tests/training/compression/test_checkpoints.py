"""What compressors remember is part of checkpoints: to the bit on as many ranks, and in the mean on others."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import shardscope as ss
from conformance.compressor import bucket_of, exchange, gradients, make
from conformance.methods import carried_by, remembering
from conformance.ranks import RankPool
from conformance.sharded import jagged
from shardscope.training.context import RankContext
from shardscope.training.sharding import local
from shardscope.training.strategies._relayout import relayout
from shardscope.training.trainer import Trainer

STEPS, HALF = 5, 2


def job_of(strategy: Any, world_size: int, method: ss.Compression, **changes: Any) -> ss.Job:
    fields: dict[str, Any] = {
        "model": jagged, "data": "digits", "batch": 24, "steps": STEPS, "optimizer": optimizer_for(method),
        "checkpoint": ss.Checkpoint(every=HALF, keep=9),
    }  # fmt: skip
    return ss.Job(strategy=strategy, world_size=world_size, compression=method, **{**fields, **changes})


class Never:
    def should_stop(self, step: int) -> bool:
        return False


def parameters_of(trainer: Trainer) -> list[Tensor]:
    """This rank's own; whole ones can no longer be gathered when a run is over."""
    return [local(p.detach()).clone() for p in trainer.model.parameters()]


def methods_of(strategy: Any) -> list[ss.Compression]:
    """All that remember something under the ring; a few of them elsewhere, where they are kept in the same way."""
    kind = strategy if isinstance(strategy, str) else strategy.kind
    if kind == "ring":
        known = remembering(kind)
        return known + [m for m in carried_by(kind) if m.kind in ("layers", "steps") and m not in known]
    found = carried_by(kind) if kind == "gossip" else remembering(kind)  # its public copies remember
    return [method for method in found if method.name in ("int8", "int4", "topk")]


def optimizer_for(method: ss.Compression) -> ss.Optimizer:
    """One that goes with the method."""
    if method.name == "dgc":
        return ss.Optimizer("sgd", lr=0.05, momentum=0.0)
    return ss.Optimizer("adamw", lr=2e-3) if method.name == "onebit-adam" else ss.Optimizer("lamb", lr=0.02)


def job_for(strategy: Any, world_size: int, method: ss.Compression) -> tuple[ss.Job, int]:
    """A job for the method and the step to go on from: past their warm-up for methods that have one."""
    half, steps = (6, 8) if method.kind == "steps" else (HALF, STEPS)
    return job_of(strategy, world_size, method, steps=steps, checkpoint=ss.Checkpoint(every=half)), half


FEWER = {3: ["zero-1", "zero-3"], 4: ["parameter-server"]}


@pytest.mark.parametrize(
    "strategy",
    ["ring", "all-reduce", ss.Zero1(bucket_mb=0.002), "zero-2", "zero-3", "parameter-server", "gossip"],
    ids=str,
)
def test_a_resumed_run_equals_the_uninterrupted_one_to_the_bit(
    pool: RankPool, tmp_path: Path, strategy: Any
) -> None:
    kind = strategy if isinstance(strategy, str) else strategy.kind
    if kind not in FEWER.get(pool.world_size, [kind]):
        pytest.skip("two ranks will do")

    def body(context: RankContext) -> list[tuple[str, list[Tensor], list[Tensor]]]:
        rows = []
        for method in methods_of(strategy):
            folder = tmp_path / method.label.replace(" ", "-")
            job, half = job_for(strategy, context.world_size, method)
            whole = Trainer(job, context, folder)
            whole.train(Never())
            later = folder / f"checkpoints/step-{2 * half}"
            if context.rank == 0 and later.is_dir():
                later.rename(folder / "later")  # as if it had ended after the first checkpoint
            torch.distributed.barrier()
            resumed = Trainer(job, context, tmp_path / "resumed")
            resumed.resume(folder / "checkpoints")
            assert resumed.first_step == half + 1
            resumed.train(Never())
            rows.append((method.label, parameters_of(whole), parameters_of(resumed)))
        return rows

    for rows in pool.run(body, tmp_path):
        assert rows
        for label, whole, resumed in rows:
            assert all(torch.equal(a, b) for a, b in zip(whole, resumed, strict=True)), label


def owed_by(trainer: Trainer, shards: int) -> dict[str, Tensor]:
    """Residuals by parameter or, laid out for one rank, by unit."""
    state = trainer.strategy.remembered()
    if not trainer.job.strategy.kind.startswith(("zero-2", "zero-3")):
        return {name: tensor.clone() for name, tensor in state.items() if "padding" not in name}
    shapes = trainer.strategy._shapes()
    return {name: relayout(flat, shapes[name.partition(".")[2]], shards, 1) for name, flat in state.items()}


@pytest.mark.parametrize(
    ("strategy", "then"), [("zero-1", "zero-1"), ("zero-2", "zero-3"), ("ring", "zero-1")]
)
def test_on_other_ranks_the_mean_of_what_is_owed_stays(
    pool: RankPool, tmp_path: Path, strategy: str, then: str
) -> None:
    if pool.world_size != 3:
        pytest.skip("from three ranks to two")
    method = ss.Compression("int4", feedback=True)
    fields = {"optimizer": "adamw"}

    def save(context: RankContext) -> dict[str, Tensor]:
        trainer = Trainer(job_of(strategy, 3, method, **fields), context, tmp_path)
        for step in range(1, HALF + 1):
            trainer.take_step(step)
        trainer._save(HALF)
        owed = owed_by(trainer, 3)
        trainer.strategy.close()
        return owed

    def load(context: RankContext) -> dict[str, Tensor]:
        trainer = Trainer(job_of(then, 2, method, **fields), context, tmp_path / "then")
        trainer.resume(tmp_path / "checkpoints")
        owed = owed_by(trainer, 2)
        trainer.take_step(HALF + 1)
        trainer.strategy.close()
        return owed

    old = pool.run(save, tmp_path)
    two = RankPool(2)
    try:
        new = two.run(load, tmp_path)
    finally:
        two.close()
    names = [name for name in old[0] if name.startswith("residual.")]
    assert names
    for name in names:
        mean = sum(owed[name] for owed in old) / 3
        for owed in old:  # a share owes its part of the mean alone
            for piece, tensor in owed.items():
                if piece.startswith(f"share.{name.removeprefix('residual.')}@"):
                    start = int(piece.rpartition("@")[2])
                    mean[start : start + tensor.numel()] += tensor
        assert float(mean.norm()) > 0
        for owed in new:
            assert torch.allclose(owed[name], mean, rtol=0, atol=1e-6 * float(mean.abs().max())), name


def test_merged_states_owe_what_all_owed(pool: RankPool, tmp_path: Path) -> None:
    """Residuals and, in the two-phase way, what each rank's share of the mean was short of."""

    def body(context: RankContext) -> tuple[Tensor, dict[str, Tensor]]:
        compressor = make(ss.Compression("int4", feedback=True, block=64), context)
        got = sum(exchange(compressor, context, gradients(context.rank, step), step) for step in (1, 2, 3))
        return got, compressor.state_dict()

    ranks = pool.run(body, tmp_path)
    world = range(pool.world_size)
    owed = (
        sum(sum(gradients(rank, step) for rank in world) / pool.world_size for step in (1, 2, 3))
        - ranks[0][0]
    )
    merged = make(ss.Compression("int4", feedback=True), _Alone(pool.world_size)).merge(s for _, s in ranks)
    bucket = bucket_of(torch.zeros_like(owed))
    flat = torch.cat([merged[f"residual.{name}"] for name in bucket.names])
    assert set(merged) == {f"residual.{name}" for name in bucket.names}
    assert torch.allclose(flat, owed, rtol=0, atol=1e-4)


class _Alone:
    def __init__(self, world_size: int) -> None:
        self.world_size = world_size


@pytest.mark.parametrize(("old", "new"), [(1, 4), (3, 2), (4, 3), (2, 7)])
def test_a_new_layout_holds_each_parameters_rows_where_torch_would_cut_them(old: int, new: int) -> None:
    wholes = [torch.randn(shape) for shape in [(5, 3), (1,), (7, 2, 2), (8,)]]
    shapes = [whole.shape for whole in wholes]

    def laid_out(ranks: int) -> Tensor:
        chunks = []
        for rank in range(ranks):
            for whole in wholes:
                room = torch.zeros(-(-whole.shape[0] // ranks), *whole.shape[1:])
                parts = whole.chunk(ranks)
                if rank < len(parts):
                    room[: len(parts[rank])] = parts[rank]
                chunks.append(room.flatten())
        return torch.cat(chunks)

    assert torch.equal(relayout(laid_out(old), shapes, old, new), laid_out(new))


def test_a_run_that_never_compressed_has_nothing_to_recall(pool: RankPool, tmp_path: Path) -> None:
    if pool.world_size == 4:
        pytest.skip("two and three ranks will do")

    def body(context: RankContext) -> list[float | None]:
        plain = Trainer(job_of("gossip", context.world_size, ss.Compression()), context, tmp_path)
        plain.train(Never())
        packed = Trainer(
            job_of("gossip", context.world_size, ss.Compression("int8"), steps=7),
            context,
            tmp_path / "packed",
        )
        packed.resume(tmp_path / "checkpoints")
        copies = packed.strategy.public.copies
        assert all(torch.equal(copy, copies[context.rank]) for copy in copies.values())
        return [packed.take_step(step) for step in (6, 7)]

    for losses in pool.run(body, tmp_path):
        assert all(loss is not None and loss < 4 for loss in losses)
