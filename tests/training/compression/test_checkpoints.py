"""What compressors remember is part of checkpoints: to the bit on as many ranks, and in the mean on others."""

from __future__ import annotations

import json
import math
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import shardscope as ss
from conformance.alone import Never, parameters_of
from conformance.compressor import SHAPES, bucket_of, carrier_of, exchange, gradients, make
from conformance.methods import carried_by, remembering
from conformance.ranks import RankPool
from conformance.sharded import jagged
from shardscope.training.compression import Bucket
from shardscope.training.context import RankContext
from shardscope.training.strategies._relayout import by_parameter, relayout, units_with_parameters
from shardscope.training.trainer import Trainer

STEPS, HALF = 5, 2


def job_of(strategy: Any, world_size: int, method: ss.Compression, **changes: Any) -> ss.Job:
    fields: dict[str, Any] = {
        "model": jagged, "data": "digits", "batch": 24, "steps": STEPS, "optimizer": optimizer_for(method),
        "checkpoint": ss.Checkpoint(every=HALF, keep=9),
    }  # fmt: skip
    return ss.Job(strategy=strategy, world_size=world_size, compression=method, **{**fields, **changes})


def methods_of(strategy: Any) -> list[ss.Compression]:
    """All that remember something under the ring; a few of them elsewhere, where they are kept in the same way."""
    kind = strategy if isinstance(strategy, str) else strategy.name
    if kind == "ring":
        known = remembering(kind)
        return known + [m for m in carried_by(kind) if m.carriage in ("layers", "steps") and m not in known]
    found = carried_by(kind) if kind == "gossip" else remembering(kind)  # its public copies remember
    return [method for method in found if method.name in ("int8", "int4", "topk")]


def optimizer_for(method: ss.Compression) -> ss.Optimizer:
    """One that goes with the method."""
    if method.name == "dgc":
        return ss.Optimizer("sgd", lr=0.05, momentum=0.0)
    return ss.Optimizer("adamw", lr=2e-3) if method.name == "onebit-adam" else ss.Optimizer("lamb", lr=0.02)


def job_for(strategy: Any, world_size: int, method: ss.Compression) -> tuple[ss.Job, int]:
    """A job for the method and the step to go on from: past their warm-up for methods that have one."""
    half, steps = (6, 8) if method.carriage == "steps" else (HALF, STEPS)
    return job_of(strategy, world_size, method, steps=steps, checkpoint=ss.Checkpoint(every=half)), half


FEWER = {3: ["zero-1", "zero-3"], 4: ["parameter-server"]}


@pytest.mark.slow
@pytest.mark.parametrize(
    "strategy",
    ["ring", "all-reduce", ss.Zero1(bucket_mb=0.002), "zero-2", "zero-3", "parameter-server", "gossip"],
    ids=str,
)
def test_a_resumed_run_equals_the_uninterrupted_one_to_the_bit(
    pool: RankPool, tmp_path: Path, strategy: Any
) -> None:
    kind = strategy if isinstance(strategy, str) else strategy.name
    if kind not in FEWER.get(pool.world_size, [kind]):
        pytest.skip("two ranks will do")

    def body(context: RankContext) -> list[tuple[str, list[Tensor], list[Tensor]]]:
        rows = []
        for method in methods_of(strategy):
            folder = tmp_path / method.label.replace(" ", "-")
            folder.mkdir(exist_ok=True)
            job, half = job_for(strategy, context.world_size, method)
            whole = Trainer(job, context, folder)
            whole.train(Never())
            later = folder / f"checkpoints/step-{2 * half}"
            if context.rank == 0 and later.is_dir():
                later.rename(folder / "later")  # as if it had ended after the first checkpoint
            torch.distributed.barrier()
            (tmp_path / "resumed").mkdir(exist_ok=True)
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
    """Residuals by parameter."""
    state = trainer.strategy.compressor_state()
    if not trainer.job.strategy.name.startswith(("zero-2", "zero-3")):
        return {name: tensor.clone() for name, tensor in state.items() if "padding" not in name}
    return by_parameter(state, units_with_parameters(trainer.model), shards)


def recalled(context: RankContext) -> list[str]:
    """What this rank's events say of it."""
    events = map(json.loads, filter(None, context.events.path.read_text().splitlines()))
    return [event["compressor_state"] for event in events if event["event"] == "resume"]


@pytest.mark.ranks(2)  # names are the same on any number of ranks
def test_units_hold_the_parameters_that_torch_puts_there_in_its_order(pool: RankPool, tmp_path: Path) -> None:
    def body(context: RankContext) -> list[tuple[list[str], list[str]]]:
        rows = []
        for model in (jagged, "gpt-nano"):
            data = "digits" if model is jagged else "python-source"
            job = job_of("zero-3", 2, ss.Compression("int4"), model=model, data=data)
            (tmp_path / str(len(rows))).mkdir(exist_ok=True)
            trainer = Trainer(job, context, tmp_path / str(len(rows)))
            ours = units_with_parameters(trainer.model)
            for name, unit in zip(trainer.strategy.unit_names, trainer.strategy.units, strict=True):
                inside = "" if name == "model" else f"{name}."
                group = unit._get_fsdp_state()._fsdp_param_group
                held = [] if group is None else group.fsdp_params  # none lie outside the blocks
                theirs = [
                    f"{inside}{key}"
                    for parameter in held
                    for key, other in unit.named_parameters()
                    if other is parameter.sharded_param
                ]
                rows.append((list(ours[name]), theirs))
            trainer.strategy.close()
        return rows

    for rows in pool.run(body, tmp_path):
        assert all(ours == theirs for ours, theirs in rows)
        assert sum(len(ours) > 1 for ours, _ in rows) > 4


def owed_in_the_mean(ranks: list[dict[str, Tensor]], name: str) -> Tensor:
    """What the mean of a tensor is short of: the mean of all residuals, and what each share owes alone."""
    mean = sum(owed[name] for owed in ranks) / len(ranks)
    for owed in ranks:
        for piece, tensor in owed.items():
            if piece.startswith(f"share.{name.removeprefix('residual.')}@"):
                start = int(piece.rpartition("@")[2])
                mean[start : start + tensor.numel()] += tensor
    return mean  # type: ignore[return-value]


@pytest.mark.slow
@pytest.mark.ranks(3)  # from three ranks to two
@pytest.mark.parametrize(
    ("strategy", "then"),
    [
        ("zero-1", "zero-1"),
        ("zero-2", "zero-3"),
        ("ring", "zero-1"),
        ("ring", "zero-3"),
        ("zero-2", "all-reduce"),
    ],
)
def test_on_other_ranks_the_mean_of_what_is_owed_stays(
    pool: RankPool, tmp_path: Path, strategy: str, then: str
) -> None:
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
        (tmp_path / "then").mkdir(exist_ok=True)
        trainer = Trainer(job_of(then, 2, method, **fields), context, tmp_path / "then")
        trainer.resume(tmp_path / "checkpoints")
        assert recalled(context) == ["the mean"]
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
        mean = owed_in_the_mean(old, name)
        assert float(mean.norm()) > 0
        for owed in new:
            assert torch.allclose(owed[name], mean, rtol=0, atol=1e-6 * float(mean.abs().max())), name


@pytest.mark.ranks(2)
def test_a_method_that_keeps_nothing_says_that_it_recalls_nothing(pool: RankPool, tmp_path: Path) -> None:
    def body(context: RankContext) -> None:
        with_feedback = ss.Compression("int4", feedback=True)
        saving = Trainer(job_of("ring", 2, with_feedback, steps=HALF), context, tmp_path)
        saving.train(Never())
        for strategy, method, said in [
            ("ring", ss.Compression("int4"), "nothing"),
            ("zero-1", ss.Compression("int4"), "nothing"),
            ("ring", with_feedback, "its own"),
        ]:
            (tmp_path / "then").mkdir(exist_ok=True)
            trainer = Trainer(job_of(strategy, 2, method), context, tmp_path / "then")
            trainer.resume(tmp_path / "checkpoints")
            assert recalled(context)[-1] == said
            trainer.strategy.close()

    pool.run(body, tmp_path)


@pytest.mark.ranks(2, 3)
def test_on_the_same_ranks_other_buckets_owe_the_same(pool: RankPool, tmp_path: Path) -> None:
    """Each rank's share of the mean is another one then, and what the old one owed is not lost."""
    method = ss.Compression("int4", feedback=True, block=64)

    def body(context: RankContext) -> tuple[dict[str, Tensor], ...]:
        small, whole = (
            job_of(ss.Ring(bucket_mb=size), context.world_size, method, optimizer="adamw")
            for size in (0.0002, 1)
        )
        trainer = Trainer(small, context, tmp_path)
        for step in range(1, HALF + 1):
            trainer.take_step(step)
        trainer._save(HALF)
        old = owed_by(trainer, 1)
        trainer.strategy.close()
        (tmp_path / "then").mkdir(exist_ok=True)
        trainer = Trainer(whole, context, tmp_path / "then")
        trainer.resume(tmp_path / "checkpoints")
        new = owed_by(trainer, 1)
        trainer.take_step(HALF + 1)
        later = owed_by(trainer, 1)
        trainer.strategy.close()
        return old, new, later

    old, new, later = (list(states) for states in zip(*pool.run(body, tmp_path), strict=True))
    names = [name for name in old[0] if name.startswith("residual.")]
    assert any(name.startswith("share.") for name in old[0])
    for name in names:
        mean, now = owed_in_the_mean(old, name), owed_in_the_mean(new, name)
        assert torch.allclose(now, mean, rtol=0, atol=1e-6 * float(mean.abs().max())), name
    assert shares_of(later) == sum(p.numel() for p in jagged().parameters())


def shares_of(ranks: list[dict[str, Tensor]]) -> int:
    """Elements in shares that ranks remember."""
    return sum(tensor.numel() for owed in ranks for name, tensor in owed.items()
               if name.startswith("share.") and "padding" not in name)  # fmt: skip


@pytest.mark.ranks(2, 3)
def test_a_new_cut_forgets_the_pieces_of_the_old_one_and_owes_what_was_not_sent(
    pool: RankPool, tmp_path: Path
) -> None:
    method, shapes = ss.Compression("int4", feedback=True, block=64), SHAPES
    size = sum(math.prod(shape) for shape in shapes)

    def run(
        steps: range, cuts: list[int], states: list[Any] | None
    ) -> tuple[Tensor, list[dict[str, Tensor]]]:
        def body(context: RankContext) -> tuple[Tensor, dict[str, Tensor]]:
            compressor, total = make(method, context), torch.zeros(size)
            if states is not None:
                compressor.load_state_dict(states[context.rank])
            for step in steps:
                compressor.begin_step(step)
                whole = bucket_of(gradients(context.rank, step), step)
                for first, last in pairwise([0, *cuts, len(shapes)]):
                    start, stop = sum(whole.sizes[:first]), sum(whole.sizes[:last])
                    flat = whole.flat[start:stop]
                    part = Bucket(whole.names[first:last], whole.shapes[first:last], flat, step)
                    compressor.mean_(part, carrier_of(context))
                total += whole.flat
            return total, compressor.state_dict()

        totals, kept = zip(*pool.run(body, tmp_path), strict=True)
        return totals[0], list(kept)

    sent, old = run(range(1, 4), [], None)
    merge = make(method, _Alone(pool.world_size)).merge
    sent_later, new = run(range(4, 7), [3], [merge(old)] * pool.world_size)
    asked = sum(gradients(rank, step) for rank in range(pool.world_size) for step in range(1, 7))
    left = merge(new)
    owed = torch.cat([left[f"residual.p{i}"] for i in range(len(shapes))])
    assert torch.allclose(sent + sent_later + owed, asked / pool.world_size, rtol=0, atol=1e-4)
    assert shares_of(run(range(4, 5), [3], old)[1]) == size


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


@pytest.mark.ranks(2, 3)
def test_a_run_that_never_compressed_has_nothing_to_recall(pool: RankPool, tmp_path: Path) -> None:
    def body(context: RankContext) -> list[float | None]:
        plain = Trainer(job_of("gossip", context.world_size, ss.Compression("none")), context, tmp_path)
        plain.train(Never())
        (tmp_path / "packed").mkdir(exist_ok=True)
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
