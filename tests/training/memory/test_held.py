"""Model states measured on real ranks, against the formula, to the byte."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch import nn

import shardscope as ss
from conformance.memory import batch, make, step
from conformance.ranks import RankPool
from conformance.runs import small_job
from shardscope.analytic.memory import model_states
from shardscope.methods.strategies.parameter_server._torch_messages import HEADER_BYTES
from shardscope.training.context import RankContext
from shardscope.training.memory import MemoryWatch, StepMemory, Storages, held_by_default
from shardscope.training.trainer import Trainer

OPTIMIZERS = ["sgd", "nesterov", "adamw", "lamb", "lars"]
MODELS = [("mlp", "digits"), ("cnn", "digits"), ("gpt-nano", "python-source")]


def measured(job: ss.Job, step: int = 3) -> Callable[[RankContext], tuple[dict[str, int], int, int]]:
    """Peaks of the step, parameters, and parameter tensors, on one rank."""

    def run(context: RankContext) -> tuple[dict[str, int], int, int]:
        trainer = Trainer(job, context, context.events.path.parent)
        for number in range(1, step):
            trainer.take_step(number)
        rows = trainer._micro_batches(step)
        watch = trainer.strategy.memory
        with watch.measure(
            lambda: trainer.strategy.held(trainer.optimizer), rows[0], trainer.model
        ) as memory:
            trainer.strategy.step(rows, trainer.loss_function, trainer.optimizer)
        trainer.strategy.close()
        return memory.peaks, trainer.num_params, len(list(trainer.model.parameters()))

    return run


@pytest.fixture(scope="module")
def two() -> Iterator[RankPool]:
    """Two ranks: replicas hold the same at any number of them."""
    ranks = RankPool(2)
    yield ranks
    ranks.close()


@pytest.mark.sampled
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize(("model", "data"), MODELS)
@pytest.mark.parametrize("strategy", ["all-reduce", "ring", "tree", "hierarchical"])
def test_replicas_hold_what_the_formula_says(
    two: RankPool, tmp_path: Path, strategy: str, model: str, data: str, optimizer: str
) -> None:
    job = ss.Job(model=model, data=data, strategy=strategy, world_size=2, optimizer=optimizer, batch=8)
    for peaks, num_params, num_tensors in two.run(measured(job), tmp_path):
        expected = model_states(num_params, optimizer=optimizer, num_tensors=num_tensors)
        held = [peaks[kind] for kind in ("parameters", "gradients", "optimizer")]
        assert held == [int(term) for term in expected]
        assert peaks["gathered"] == 0


@pytest.mark.parametrize(
    ("precision", "recipe"),
    [("fp64", "fp64"), ("bf16-mixed", "bf16-autocast"), ("fp16-mixed", "fp16-autocast")],
)
def test_precisions_hold_what_the_formula_says(
    two: RankPool, tmp_path: Path, precision: str, recipe: str
) -> None:
    job = ss.Job(
        model="mlp", data="digits", strategy="ring", world_size=2, optimizer="adamw", batch=8, precision=precision
    )  # fmt: skip
    for peaks, num_params, num_tensors in two.run(measured(job), tmp_path):
        expected = model_states(num_params, precision=recipe, num_tensors=num_tensors)
        assert [peaks[kind] for kind in ("parameters", "gradients", "optimizer")] == [
            int(t) for t in expected
        ]


def test_accumulation_holds_gradients_beside_the_buckets(two: RankPool, tmp_path: Path) -> None:
    """While DistributedDataParallel exchanges nothing, gradients add up outside its buckets, which stay."""
    job = ss.Job(model="mlp", data="digits", strategy="ring", world_size=2, batch=ss.Batch(16, micro_batch=4))
    for peaks, num_params, _ in two.run(measured(job), tmp_path):
        assert peaks["gradients"] == 2 * 4 * num_params


def test_gossip_holds_a_flat_copy_and_room_for_its_neighbours_beside_its_model(
    two: RankPool, tmp_path: Path
) -> None:
    job = ss.Job(model="mlp", data="digits", strategy="gossip", world_size=2, optimizer="adamw", batch=8)
    for peaks, num_params, num_tensors in two.run(measured(job), tmp_path):
        expected = model_states(num_params, num_tensors=num_tensors)
        assert [peaks[kind] for kind in ("parameters", "gradients", "optimizer")] == [
            int(t) for t in expected
        ]
        assert peaks["buffers"] == 2 * 4 * num_params


@pytest.mark.sampled
@pytest.mark.parametrize("dedicated", [False, True])
def test_a_server_holds_the_optimizer_and_room_for_its_workers(*, dedicated: bool) -> None:
    """The worker's copies, the server's own tensors, and a message of each worker, with its header."""
    strategy = ss.ParameterServer(dedicated=dedicated)
    run = ss.launch(small_job(strategy=strategy, world_size=3, batch=48, steps=3, optimizer="adamw")).wait(60)
    server, worker, _ = run.memory().to_dict("records")
    num_params = run.events("start")[0]["num_params"]
    states = model_states(num_params, num_tensors=14)  # of the mlp
    message = 4 * num_params + HEADER_BYTES
    assert worker["parameters"] == worker["gradients"] == 4 * num_params
    assert worker["optimizer"] == 0
    assert worker["buffers"] == 2 * message
    assert server["parameters"] == 4 * num_params + message
    assert server["optimizer"] == int(states.optimizer)
    assert server["gradients"] == (1 if dedicated else 2) * 4 * num_params
    assert server["buffers"] == (2 if dedicated else 3) * message


def test_buffers_of_the_ring_are_counted(two: RankPool, tmp_path: Path) -> None:
    """Two receives are posted ahead into buffers of one chunk each."""
    job = ss.Job(model="mlp", data="digits", strategy="ring", world_size=2, batch=8)
    for peaks, num_params, _ in two.run(measured(job), tmp_path):
        assert peaks["buffers"] == 2 * 4 * -(-num_params // 2)


@pytest.mark.parametrize("keep", [True, False])
def test_fully_sharded_parameters_count_as_shards_and_as_gathered(
    pool: RankPool, tmp_path: Path, *, keep: bool
) -> None:
    """Shards count with their padding; with them resharded, one block is gathered at a time, and the root's own."""

    def shard(context: RankContext) -> tuple[dict[str, int], dict[str, list[torch.Size]]]:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        model, rows = make("mlp"), batch("mlp")
        parts = {f"block {i}": block for i, block in enumerate(model.blocks)} | {"root": model.head}
        shapes = {name: [parameter.shape for parameter in part.parameters()] for name, part in parts.items()}
        mesh = init_device_mesh("cpu", (context.world_size,))
        for block in model.blocks:
            fully_shard(block, mesh=mesh, reshard_after_forward=not keep)
        fully_shard(model, mesh=mesh)
        optimizer = torch.optim.AdamW(model.parameters())
        step(model, optimizer, rows)
        watch = MemoryWatch(torch.device("cpu"))
        with watch.measure(lambda: held_by_default(model, optimizer), rows, model) as memory:
            step(model, optimizer, rows)
        return memory.peaks, shapes

    world = pool.world_size
    for peaks, shapes in pool.run(shard, tmp_path):
        padded = {
            name: 4 * sum(-(-shape[0] // world) * shape[1:].numel() for shape in part)
            for name, part in shapes.items()
        }
        blocks = [size for name, size in padded.items() if name != "root"]
        gathered = padded["root"] + (sum(blocks) if keep else max(blocks))
        assert peaks["parameters"] == sum(padded.values())
        assert peaks["gathered"] == world * gathered
        num_tensors = sum(map(len, shapes.values()))
        assert 0 < peaks["optimizer"] <= 2 * sum(padded.values()) + 4 * num_tensors


def test_what_is_gathered_counts_until_it_is_freed() -> None:
    memory = StepMemory(dict, [])
    first, second = torch.zeros(100), torch.zeros(50)
    memory.hold("gathered", [first])
    first.untyped_storage().resize_(0)  # as FSDP2 frees what it has gathered
    memory.hold("gathered", [second])
    assert memory.peaks["gathered"] == 400
    first.untyped_storage().resize_(400)
    memory.hold("gathered", [])
    assert memory.peaks["gathered"] == 600


def test_a_storage_counts_once_under_the_first_kind_that_names_it() -> None:
    flat = torch.zeros(100)
    known = Storages()
    known.add_all({"parameters": [flat[:50], flat[50:]], "buffers": [flat]})
    assert known.sizes() == {"parameters": 400}
    known.add("buffers", [torch.zeros(10)])
    assert known.sizes() == {"parameters": 400}  # freed at once


def test_sparse_gradients_count_with_their_indices() -> None:
    table = nn.Embedding(100, 8, sparse=True)
    table(torch.tensor([1, 5])).sum().backward()
    known = Storages()
    known.add("gradients", [table.weight.grad])  # type: ignore[list-item]
    assert known.sizes()["gradients"] == 2 * 8 + 2 * 8 * 4


def test_what_is_on_the_meta_device_takes_no_memory() -> None:
    known = Storages()
    known.add("parameters", [torch.zeros(100, device="meta"), torch.zeros(10)])
    assert known.sizes() == {}  # freed at once
    kept, gone = torch.zeros(10), torch.zeros(100, device="meta")
    known.add("parameters", [gone, kept])
    assert known.sizes() == {"parameters": 40}


def test_a_rank_of_a_pipeline_holds_its_own_layers_only(pool: RankPool, tmp_path: Path) -> None:
    job = ss.Job(
        model="mlp", data="digits", strategy=ss.Pipeline(split="even"), world_size=pool.world_size, batch=24
    )
    ranks = pool.run(measured(job), tmp_path)
    assert sum(peaks["parameters"] for peaks, _, _ in ranks) == 4 * ranks[0][1]
