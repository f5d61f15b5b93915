"""A model divided over a tensor group: copies stay equal, checkpoints fit any layout, and misfits are refused."""

from __future__ import annotations

import json
import math
import random
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import shardscope as ss
from conformance.alone import context_for, losses_alone
from conformance.one_process import hold_evaluation
from conformance.ranks import RankPool
from conformance.strategy import OPTIMIZERS, job, mean_losses, tiny_gpt
from shardscope.spec.models import GPTConfig
from shardscope.training.checkpoint.index import read_index
from shardscope.training.context import RankContext
from shardscope.training.models import build_model
from shardscope.training.trainer import Trainer

DATA = {
    "ring": ss.Ring(bucket_mb=0.02), "tree": ss.Tree(bucket_mb=0.02), "all-reduce": ss.AllReduce(bucket_mb=0.02),
    "zero-1": ss.Zero1(bucket_mb=0.02), "zero-1 stock": ss.Strategy("zero-1:backend"), "zero-2": ss.Zero2(),
    "zero-3": ss.Zero3(), "zero-3 stock": ss.Strategy("zero-3:backend"),
}  # fmt: skip


def mesh(data: str = "ring", **settings: Any) -> ss.Strategy:
    return ss.Strategy("mesh", data=DATA[data], **{"tensor": 2, **settings})


def mesh_job(data: str = "ring", **changes: Any) -> ss.Job:
    fields = {"strategy": mesh(data), "world_size": 4, "batch": ss.Batch(48, micro_batch=12)}
    return job(**{**fields, **changes})


def deeper_gpt() -> nn.Module:
    return build_model(GPTConfig(layers=2, hidden=16, heads=4, vocab=256, seq=16, ffn=32))


# Tensors that all ranks of a tensor group hold whole.


def _whole_tensors(ours: ss.Job, context: RankContext) -> dict[str, bytes]:
    trainer = Trainer(ours, context, context.events.path.parent)
    for step in range(1, ours.steps + 1):
        trainer.take_step(step)
    split = trainer.strategy.tensor_split
    assert split is not None
    found = {
        name: tensor.detach().numpy().tobytes()
        for name, tensor in trainer.strategy.updated_parameters
        if name not in split.cuts
    }
    trainer.strategy.close()
    return found


@pytest.mark.ranks(4)
def test_copies_on_four_ranks_stay_equal_to_the_bit(pool: RankPool, tmp_path: Path) -> None:
    ours = mesh_job(strategy=mesh(tensor=4), precision="fp32", clip_norm=0.5, model=deeper_gpt)
    copies = pool.run(partial(_whole_tensors, ours), tmp_path)
    assert all(each == copies[0] for each in copies)


@pytest.mark.ranks(4)
@pytest.mark.parametrize("data", DATA)
@pytest.mark.parametrize("optimizer", ["adamw", "lamb"])
def test_copies_of_whole_tensors_stay_equal_to_the_bit(
    pool: RankPool, tmp_path: Path, data: str, optimizer: str
) -> None:
    ours = mesh_job(data, optimizer=OPTIMIZERS[optimizer], precision="fp32", clip_norm=0.5, model=deeper_gpt)
    first, second, third, fourth = pool.run(partial(_whole_tensors, ours), tmp_path)
    assert first == second
    assert third == fourth
    assert {"tokens.weight", "norm.weight", "blocks.0.ffn.narrow.project.bias"} <= first.keys()


COMPRESSIONS = {
    "int8": {}, "fp8": {}, "topk": {"ratio": 0.1}, "randomk": {"ratio": 0.1}, "powersgd": {}, "bf16": {}, "sign": {},
    "natural": {}, "qsgd": {}, "terngrad": {}, "int4": {}, "randomblock": {}, "dgc": {}, "sign-vote": {}, "fp16": {},
}  # fmt: skip


@pytest.mark.sampled
@pytest.mark.ranks(4)
@pytest.mark.parametrize("compression", COMPRESSIONS)
@pytest.mark.parametrize("data", ["ring", "all-reduce"])
def test_copies_of_whole_tensors_stay_equal_with_compressed_gradients(
    pool: RankPool, tmp_path: Path, data: str, compression: str
) -> None:
    method = ss.Compression(compression, **COMPRESSIONS[compression])
    optimizer = ss.Optimizer("sgd", lr=0.01, momentum=0.0)
    ours = mesh_job(
        data, compression=method, optimizer=optimizer, precision="fp32", model=deeper_gpt, steps=8
    )
    first, second, third, fourth = pool.run(partial(_whole_tensors, ours), tmp_path)
    assert first == second == third == fourth


def _resumed_compressed(ours: ss.Job, later: ss.Job, folder: str, context: RankContext) -> Any:
    first = Trainer(ours, context, Path(folder))
    for step in (1, 2):
        first.take_step(step)
    first.checkpoints.save(2)
    losses = [first.take_step(step) for step in (3, 4)]
    first.strategy.close()
    dist.barrier()
    trainer = Trainer(later, context, context.events.path.parent)
    trainer.resume(Path(folder) / "checkpoints")
    again = [trainer.take_step(step) for step in (3, 4)]
    trainer.strategy.close()
    return losses, again, context.events.path.read_text()


@pytest.mark.slow
@pytest.mark.ranks(4)
@pytest.mark.parametrize("parts", [{"tensor": 2}, {"tensor": 1, "pipeline": 2}], ids=["tensor", "stages"])
def test_residuals_of_parts_are_resumed_under_the_same_layout_only(
    pool: RankPool, tmp_path: Path, parts: dict[str, int]
) -> None:
    folder = tmp_path / "saved"
    folder.mkdir()
    ours = mesh_job(
        compression=ss.Compression("topk", ratio=0.1), precision="fp32", model=deeper_gpt, steps=4,
        strategy=mesh(**parts),
    )  # fmt: skip
    for losses, again, _ in pool.run(partial(_resumed_compressed, ours, ours, str(folder)), tmp_path):
        assert losses == again
    other = ours.replace(strategy=DATA["ring"] if "pipeline" not in parts else mesh("all-reduce", **parts))
    for _, _, events in pool.run(partial(_resumed_compressed, ours, other, str(folder)), tmp_path):
        assert "the tensor ranks or stages, which divide the model, have changed" in events


# Checkpoints.

CHAIN = (
    "mesh ring",
    "zero-3",
    "single",
    "context zero-3",
    "mesh zero-1",
    "mesh zero-3",
    "mesh zero-2",
    "ring",
)


def _strategy(name: str) -> dict[str, Any]:
    if name == "single":
        return {"strategy": name, "world_size": 1}
    kind, _, data = name.rpartition(" ")
    kinds = {"": DATA[data], "mesh": mesh(data), "context": mesh(data, tensor=1, context=2)}
    return {"strategy": kinds[kind], "world_size": 4}


def _through_layouts(optimizer: str, each: int, folder: str, context: RankContext) -> list[float | None]:
    losses: list[float | None] = []
    before: Path | None = None
    for number, name in enumerate(CHAIN):
        here = Path(folder) / str(number)
        ours = job(optimizer=OPTIMIZERS[optimizer], steps=len(CHAIN) * each, clip_norm=0.5, **_strategy(name))
        alone = name == "single"
        here.mkdir(exist_ok=True)
        trainer = Trainer(ours, context_for(ours, context), here)
        if before is not None:
            trainer.resume(before)
        steps = range(number * each + 1, (number + 1) * each + 1)
        losses += [trainer.take_step(step) for step in steps]
        if not alone or context.rank == 0:
            trainer.checkpoints.save((number + 1) * each)
        trainer.strategy.close()
        dist.barrier()
        before = here / "checkpoints"
    return losses


@pytest.mark.weekly  # the slow tier has the random pairs of tests/oracle/test_hybrid.py
@pytest.mark.ranks(4)
@pytest.mark.parametrize("optimizer", ["adamw", "lamb"])
def test_a_checkpoint_resumes_under_any_layout(pool: RankPool, tmp_path: Path, optimizer: str) -> None:
    each = 3
    results = pool.run(partial(_through_layouts, optimizer, each, str(tmp_path)), tmp_path)
    losses = mean_losses([(row, {}) for row in results])
    alone = job(
        optimizer=OPTIMIZERS[optimizer],
        steps=len(CHAIN) * each,
        strategy="single",
        world_size=1,
        clip_norm=0.5,
    )
    (expected, *_) = pool.run(partial(losses_alone, alone), tmp_path)
    assert losses == pytest.approx(expected, rel=1e-12)


def _saved_traffic(ours: ss.Job, folder: str, context: RankContext) -> set[str]:
    trainer = Trainer(ours, context, Path(folder))
    trainer.take_step(1)
    context.meter.drain()
    trainer.checkpoints.save(1)
    trainer.strategy.close()
    log = (context.events.path.read_text()).splitlines()
    (saved,) = [event for event in map(json.loads, log) if event["event"] == "checkpoint"]
    return {*saved["traffic"]}


@pytest.mark.ranks(4)
@pytest.mark.parametrize("data", ["ring", "zero-3"])
def test_ranks_save_their_parts_without_gathering(pool: RankPool, tmp_path: Path, data: str) -> None:
    ours = mesh_job(data, optimizer="adamw", steps=2)
    sent = pool.run(partial(_saved_traffic, ours, str(tmp_path)), tmp_path)
    assert not {name for each in sent for name in each if name.startswith("tensor:")}
    found = read_index(tmp_path / "checkpoints" / "step-1")
    for key in ("model.{}", "optimizer.state.{}.exp_avg"):
        entry = found.tensors[key.format("blocks.0.attention.qkv.weight")]
        assert sum(math.prod(piece.shape) for piece in entry.pieces) == math.prod(entry.shape)
        assert {piece.offsets[0] for piece in entry.pieces} >= {
            0,
            8,
            16,
            24,
            32,
            40,
        }  # q, k and v of each rank


# Evaluation, events, and loss scaling.


@pytest.mark.ranks(2, 4)
def test_an_evaluation_counts_each_row_once(pool: RankPool, tmp_path: Path) -> None:
    hold_evaluation(pool, tmp_path, mesh_job(world_size=pool.world_size, batch=48))


def _overflow(parameter: Tensor) -> None:
    assert parameter.grad is not None
    parameter.grad.fill_(torch.inf)


def _overflowing(ours: ss.Job, context: RankContext) -> list[tuple[float | None, bool]]:
    trainer = Trainer(ours, context, context.events.path.parent)
    trainer.take_step(1)
    cut = next(p for name, p in trainer.strategy.updated_parameters if name.endswith("qkv.weight"))
    if context.rank == 0:  # only this rank's part of one layer overflows
        cut.register_post_accumulate_grad_hook(_overflow)
    found = []
    for step in (2, 3):
        trainer.take_step(step)
        found.append((trainer.strategy.precision.loss_scale, float(cut.detach().sum())))
    return found


@pytest.mark.ranks(2)
def test_all_ranks_skip_a_step_that_overflows_in_one_part(pool: RankPool, tmp_path: Path) -> None:
    ours = mesh_job(world_size=2, batch=48, precision="fp16-mixed", optimizer=ss.Optimizer("sgd", lr=0.05))
    results = pool.run(partial(_overflowing, ours), tmp_path)
    assert results[0][1][0] == results[1][1][0] == results[0][0][0] / 2  # type: ignore[operator]
    assert all(before[1] == after[1] for before, after in results)


# What the ranks of a tensor group must have in common.


def _random_after_resume(ours: ss.Job, folder: str, context: RankContext) -> tuple[int, list[float]]:
    first = Trainer(ours.replace(strategy="ring"), context, Path(folder))
    torch.manual_seed(context.rank)
    first.checkpoints.save(1)
    first.strategy.close()
    dist.barrier()
    trainer = Trainer(ours, context, context.events.path.parent)
    trainer.resume(Path(folder) / "checkpoints")
    split = trainer.strategy.tensor_split
    trainer.strategy.close()
    return 0 if split is None else split.axis.first_rank, torch.rand(3).tolist()


@pytest.mark.ranks(4)
def test_tensor_ranks_resume_with_the_same_random_state(pool: RankPool, tmp_path: Path) -> None:
    folder = tmp_path / "saved"
    folder.mkdir()
    found = pool.run(partial(_random_after_resume, mesh_job(steps=2), str(folder)), tmp_path)
    assert [rank for rank, _ in found] == [0, 0, 2, 2]
    for rank, drawn in found:
        torch.manual_seed(rank)
        assert drawn == torch.rand(3).tolist()


class Augmented(torch.utils.data.Dataset[Any]):
    """Samples that differ between ranks from the index `start`, once `reads` samples have been read."""

    def __init__(self, rank: int, start: int, reads: int) -> None:
        self.rank, self.start, self.reads = rank, start, reads

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        self.reads -= 1
        differs = index >= self.start and self.reads < 0
        return torch.full((64,), float(index + self.rank * differs)), index % 10


def _own_batches(start: int, reads: int, steps: int, context: RankContext) -> str:
    data = partial(_data_of, Augmented(context.rank, start, reads))
    try:
        _trained(
            job(strategy=mesh(), world_size=2, model=partial(Dropping, 0.0), data=data, batch=8, steps=steps),
            context,
        )
    except ss.DataError as error:
        return str(error)
    return "nothing was refused"


def _data_of(dataset: Augmented) -> tuple[Augmented, Augmented]:
    return dataset, dataset


@pytest.mark.ranks(2)
@pytest.mark.parametrize(
    ("start", "reads", "steps"),
    [(0, 0, 1), (8, 0, 1), (0, 40, 12)],  # in the example of 8 samples, only after it, and in a later step
)
def test_tensor_ranks_that_read_different_batches_are_refused(
    pool: RankPool, tmp_path: Path, start: int, reads: int, steps: int
) -> None:
    for refusal in pool.run(partial(_own_batches, start, reads, steps), tmp_path):
        assert "the ranks of a tensor group have read different batches" in refusal


def _loss_notes(context: RankContext) -> int:
    ours = mesh_job(world_size=4)
    trainer = Trainer(ours, context, context.events.path.parent)
    trainer.weights.note = "a note"
    before = context.events.path.read_text().count("loss_note")
    trainer._announce()
    trainer.strategy.close()
    return context.events.path.read_text().count("loss_note") - before


@pytest.mark.ranks(4)
def test_a_note_on_the_loss_is_written_once(pool: RankPool, tmp_path: Path) -> None:
    assert pool.run(_loss_notes, tmp_path) == [1, 0, 0, 0]


# Refusals.


class Dropping(nn.Module):
    def __init__(self, dropout: float = 0.1, rules: dict[str, str] | None = None) -> None:
        super().__init__()
        self.up, self.down, self.drop = nn.Linear(64, 32), nn.Linear(32, 10), nn.Dropout(dropout)
        self.rules = rules or {"up": "columns", "down": "rows"}

    def tensor_plan(self) -> dict[str, str]:
        return self.rules

    def forward(self, x: Tensor) -> Tensor:
        return self.drop(self.down(self.up(x.flatten(1)).relu()))


class Normed(Dropping):
    """A plan under which ranks would normalise over their own columns only."""

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.up(x.flatten(1)).softmax(-1))


class Learned(Dropping):
    """An activation function whose parameter sees only a rank's own columns."""

    def __init__(self) -> None:
        super().__init__()
        self.act = nn.PReLU()

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.act(self.up(x.flatten(1))))


class Functional(Dropping):
    """A divided layer whose weight is used without the layer, so that gradients before it are not summed."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(64, 64)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(nn.functional.linear(self.first(x.flatten(1)), self.up.weight, self.up.bias).relu())


class Normalised(nn.Module):
    """Attention with one norm of the size of a head for the queries of all heads."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out, self.q_norm = nn.Linear(8, 96), nn.Linear(32, 10), nn.LayerNorm(8)

    def tensor_plan(self) -> dict[str, str]:
        return {"qkv": "columns:3", "out": "rows"}

    def forward(self, x: Tensor) -> Tensor:
        rows = self.qkv(x.reshape(-1, 8, 8)).unflatten(-1, (3, -1, 8))
        q, k, v = rows.transpose(1, 3).unbind(2)
        mixed = nn.functional.scaled_dot_product_attention(self.q_norm(q), k, v)
        return self.out(mixed.transpose(1, 2).flatten(2)).mean(1)


class Noisy(Dropping):
    """A model that draws random numbers in evaluation mode too."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + torch.randn(10)


class NoisyAlone(Dropping):
    """A model that draws from a generator that the ranks do not share."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + (self.training and random.SystemRandom().random())


class Hidden(Normed):
    """A wrong plan that the outputs do not show, because the layer after it is zero at first."""

    def __init__(self) -> None:
        super().__init__()
        nn.init.zeros_(self.down.weight)


class Scaled(Normed):
    """A wrong plan that has little effect on the outputs at first."""

    def __init__(self) -> None:
        super().__init__()
        self.skip, self.gamma = nn.Linear(64, 10), nn.Parameter(torch.full((10,), 1e-2))

    def forward(self, x: Tensor) -> Tensor:
        return self.skip(x.flatten(1)) + self.gamma * super().forward(x)


@pytest.mark.ranks(2)
@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"model": Noisy}, "the model draws random numbers in evaluation mode too"),
        ({"model": NoisyAlone}, "the ranks of a tensor group have different outputs"),
        ({"model": Normed}, "the divided model does not compute what the whole one does"),
        ({"model": Scaled}, "the divided model does not compute what the whole one does"),
        (
            {"model": Learned},
            "parameter 'act.weight' is whole, but each tensor rank has only the gradient of its own",
        ),
        ({"model": Learned, "precision": "bf16"}, "parameter 'act.weight' is whole"),
        ({"model": Normalised}, "parameter 'q_norm.weight' is whole"),
        ({"model": Functional}, "parameter 'first.weight' is whole"),
        (
            {"model": Hidden},
            "parameter 'down.weight' is divided, but the gradient of its parts is not that of",
        ),
        ({"model": partial(build_model, "mlp")}, "needs a plan of which layers are divided"),
        ({"model": partial(Dropping, 0.0, {"up": "columns"})}, "the divided model fails on an example"),
    ],
)
def test_what_would_train_wrongly_is_refused(
    pool: RankPool, tmp_path: Path, changes: dict[str, Any], sentence: str
) -> None:
    ours = job(**{"strategy": mesh(), "world_size": 2, "data": "digits", "precision": "fp32", **changes})
    for refusal in pool.run(partial(_refusal, ours), tmp_path):
        assert sentence in refusal


def _checked_gradients(context: RankContext) -> bool:
    from shardscope.training.strategies._divided import divide_checked
    from shardscope.training.tensor import TensorAxis, TensorSplit

    torch.manual_seed(0)
    model = nn.Sequential(nn.BatchNorm1d(64), Dropping(0.0))
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    before = torch.get_rng_state()
    plan = ss.TensorPlan({"1.up": "columns", "1.down": "rows"})
    split = TensorSplit(TensorAxis(context.world_size, context.rank, context.group), plan)
    divide_checked(model, split, torch.randn(8, 64, generator=torch.Generator().manual_seed(0)))
    kept = all(p.grad is not None and bool((p.grad == 1).all()) for p in model.parameters())
    return kept and not int(model[0].num_batches_tracked) and torch.equal(before, torch.get_rng_state())  # type: ignore[arg-type]


@pytest.mark.ranks(2)
def test_the_check_of_a_division_changes_nothing_else(pool: RankPool, tmp_path: Path) -> None:
    assert pool.run(_checked_gradients, tmp_path) == [True, True]


@pytest.mark.ranks(2)
@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16", "fp64"])
def test_a_gpt_is_not_refused_in_any_precision(pool: RankPool, tmp_path: Path, precision: str) -> None:
    ours = mesh_job(world_size=2, batch=8, model=deeper_gpt, precision=precision)
    assert {*pool.run(partial(_refusal, ours), tmp_path)} == {"nothing was refused"}


def _refusal(ours: ss.Job, context: RankContext) -> str:
    try:
        Trainer(ours, context, context.events.path.parent)
    except ss.SpecError as error:
        return str(error)
    return "nothing was refused"


@pytest.mark.ranks(4)
def test_heads_that_the_ranks_cannot_share_are_refused(pool: RankPool, tmp_path: Path) -> None:
    ours = mesh_job(strategy=mesh(tensor=4), batch=48, model=tiny_gpt)
    for refusal in pool.run(partial(_refusal, ours), tmp_path):
        assert "tensor=4 divides the number of attention heads" in refusal


@pytest.mark.ranks(2)
@pytest.mark.parametrize(
    ("model", "rules"),
    [
        (partial(Dropping, 0.0), {"up": "columns", "down": "rows"}),
        (Normalised, {"qkv": "columns:3", "out": "rows", "q_norm": "shared"}),
    ],
    ids=["columns and rows", "shared"],
)
def test_ones_own_plan_divides_ones_own_model(
    pool: RankPool, tmp_path: Path, model: Any, rules: dict[str, str]
) -> None:
    plan = ss.TensorPlan(rules)
    fields = {"model": model, "data": "digits", "batch": 48, "steps": 5}
    ours = job(strategy=mesh(tensor_plan=plan), world_size=2, **fields)
    alone = job(strategy="single", world_size=1, **fields)
    results = pool.run(partial(_trained, ours), tmp_path)
    assert results[1] == [None] * 5  # the loss of a sample counts once
    assert results[0] == pytest.approx(pool.run(partial(losses_alone, alone), tmp_path)[0], rel=1e-12)


def _trained(ours: ss.Job, context: RankContext) -> list[float | None]:
    trainer = Trainer(ours, context, context.events.path.parent)
    losses = [trainer.take_step(step) for step in range(1, ours.steps + 1)]
    trainer.strategy.close()
    return losses


# The group of all ranks.

ALLOWED = {"start_alike": "divide_model", "gather_items": None}
"""Functions that may address all ranks while a job is set up and takes steps, each with its only caller if it has one.
"""


@contextmanager
def refusing_the_default_group() -> Iterator[None]:
    """Raise if a collective of `torch.distributed` addresses all ranks because no group is named."""
    names = ("all_reduce", "broadcast", "all_gather", "all_gather_into_tensor", "reduce_scatter_tensor",
             "reduce_scatter", "all_gather_object", "broadcast_object_list", "reduce", "barrier", "send", "recv",
             "isend", "irecv", "all_to_all_single", "batch_isend_irecv")  # fmt: skip
    before = {name: getattr(dist, name) for name in names}

    def guarded(name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **options: Any) -> Any:
            is_named = options.get("group") is not None or any(isinstance(a, dist.ProcessGroup) for a in args)
            caller, above = sys._getframe(1).f_code.co_name, sys._getframe(2).f_code.co_name
            is_allowed = caller in ALLOWED and ALLOWED[caller] in {None, above}
            assert is_named or is_allowed, f"{caller}, called by {above}, calls dist.{name} without a group"
            return real(*args, **options)

        return call

    for name, real in before.items():
        setattr(dist, name, guarded(name, real))
    try:
        yield
    finally:
        for name, real in before.items():
            setattr(dist, name, real)


def _guarded(ours: ss.Job, context: RankContext) -> None:
    with refusing_the_default_group():
        trainer = Trainer(ours, context, context.events.path.parent)
        for step in (1, 2):
            trainer.take_step(step)
        trainer.strategy.full_parameters()
        with trainer.strategy.evaluating() as predict:
            predict(trainer.strategy.example()[0])
        trainer.strategy.close()


@pytest.mark.ranks(4)
@pytest.mark.parametrize("data", DATA)
def test_no_data_strategy_addresses_ranks_beyond_its_axis(pool: RankPool, tmp_path: Path, data: str) -> None:
    ours = mesh_job(data, optimizer=OPTIMIZERS["lamb"], clip_norm=0.5, precision="fp32", steps=2)
    pool.run(partial(_guarded, ours), tmp_path)
