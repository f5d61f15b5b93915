"""Cutting models: where the cuts come, what is refused, and what a rank is left with."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import shardscope as ss
from conformance.ranks import RankPool
from conformance.strategy import job, oracle, relative_difference, train
from shardscope.errors import SpecError
from shardscope.methods.strategies.pipeline._torch_cut import _split
from shardscope.methods.strategies.pipeline._torch_probe import LayerProbe
from shardscope.training.context import RankContext
from shardscope.training.emulation import Emulation
from shardscope.training.models import build_model
from shardscope.training.models.in_order import layers_in_order
from shardscope.training.recompute import apply_recompute
from shardscope.training.trainer import Trainer

BATCH = ss.Batch(48, micro_batch=6)


@pytest.mark.parametrize("name", ["mlp", "cnn", "resnet", "gpt-nano"])
@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
def test_the_layers_in_order_compute_what_the_model_does(name: str, recompute: str) -> None:
    model = apply_recompute(build_model(name), recompute)
    layers = layers_in_order(model)
    assert len(layers) == len(layers_in_order(build_model(name)))
    x = torch.zeros(2, 8, dtype=torch.int64) if name == "gpt-nano" else torch.rand(2, 1, 8, 8)
    y = x
    for _, layer in layers:
        y = layer(y)
    assert torch.equal(y, model(x))
    used = {id(p) for _, layer in layers for p in layer.parameters()}
    assert used == {id(p) for p in model.parameters()}


def test_the_catalogue_knows_how_many_layers_each_model_has() -> None:
    from shardscope.spec.models import MODELS

    for name in ("mlp", "cnn", "resnet", "gpt-nano"):
        assert len(layers_in_order(build_model(name))) == MODELS[name].num_layers_in_order


def test_nested_sequentials_are_flattened() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.ReLU(), nn.Sequential(nn.Linear(2, 1))))
    assert [name for name, _ in layers_in_order(model)] == ["0", "1.0", "1.1.0"]


def test_a_model_that_does_not_say_how_it_is_cut_is_refused() -> None:
    with pytest.raises(SpecError, match="model of type Bilinear cannot be split .* pipeline_layers"):
        layers_in_order(nn.Bilinear(2, 2, 2))


class Residual(nn.Module):
    """A model of the user's that says how it can be cut; its first and last layer share a weight."""

    def __init__(self) -> None:
        super().__init__()
        self.read = nn.Embedding(256, 12)
        self.middle = nn.ModuleList(nn.Linear(12, 12) for _ in range(4))
        self.write = nn.Linear(12, 256, bias=False)
        self.write.weight = self.read.weight

    def forward(self, tokens: Tensor) -> Tensor:
        for _, layer in self.pipeline_layers():
            tokens = layer(tokens)
        return tokens

    def pipeline_layers(self) -> list[tuple[str, nn.Module]]:
        middle = [(f"middle.{i}", layer) for i, layer in enumerate(self.middle)]
        return [("read", self.read), *middle, ("write", self.write)]


def shares_one_layer() -> nn.Module:
    """The same linear layer three times, in different stages, and activations between without parameters."""
    torch.manual_seed(0)
    again = nn.Linear(12, 12)
    return nn.Sequential(
        nn.Embedding(256, 12), again, nn.Tanh(), nn.Sequential(again, nn.Tanh()), again, nn.Linear(12, 256)
    )


def frozen_reader() -> nn.Module:
    """The first layer is not trained: its stage has nothing to update."""
    torch.manual_seed(0)
    reader = nn.Embedding(256, 12).requires_grad_(False)
    return nn.Sequential(
        reader, *(nn.Linear(12, 12) for _ in range(4)), nn.Tanh(), nn.Tanh(), nn.Linear(12, 256)
    )


def two_stages_without_parameters() -> nn.Module:
    """Where every layer is a stage of its own, some have no parameters."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Embedding(256, 12), nn.Tanh(), nn.Tanh(), nn.Linear(12, 256))


def follows(
    pool: RankPool, folder: Path, model: Callable[[], nn.Module], schedule: str, **changes: Any
) -> None:
    fields = {"optimizer": "lamb", "clip_norm": 0.5, **changes}
    ours = job(
        model=model, strategy=ss.Pipeline(schedule=schedule, split=fields.pop("split", "even")), batch=BATCH,
        world_size=pool.world_size, **{**fields, "optimizer": ss.Optimizer(fields["optimizer"], lr=5e-3)},
    )  # fmt: skip
    results = pool.run(lambda context: train(ours, context), folder)
    losses, expected = oracle(model, fields["optimizer"], "fp64", 0.5)
    assert list(max((r[0] for r in results), key=lambda row: row[0] is not None)) == pytest.approx(losses)
    assert all(relative_difference(parameters, expected) < 1e-9 for _, parameters in results)


@pytest.mark.parametrize("schedule", ["1f1b", "zero-bubble", "zbv"])
@pytest.mark.parametrize("model", [Residual, shares_one_layer, frozen_reader])
def test_models_of_the_users_follow_one_process(
    pool: RankPool, tmp_path: Path, model: Callable[[], nn.Module], schedule: str
) -> None:
    if pool.world_size > (4 if schedule == "1f1b" else 3):
        pytest.skip("fewer layers than stages")
    follows(pool, tmp_path, model, schedule)


@pytest.mark.parametrize(
    "schedule",
    [  # the model has four layers
        pytest.param("1f1b", marks=pytest.mark.ranks(4)),
        pytest.param("zero-bubble", marks=pytest.mark.ranks(2)),
    ],
)
def test_a_stage_without_parameters_takes_part(pool: RankPool, tmp_path: Path, schedule: str) -> None:
    follows(pool, tmp_path, two_stages_without_parameters, schedule)


@pytest.mark.parametrize("split", ["time", "memory"])
def test_measured_splits_follow_one_process_and_agree_on_all_ranks(
    pool: RankPool, tmp_path: Path, split: str
) -> None:
    follows(pool, tmp_path, Residual, "1f1b", split=split)

    def cut_of(context: RankContext) -> tuple[int, ...]:
        ours = job(
            model=Residual,
            strategy=ss.Pipeline(split=split),
            batch=BATCH,
            world_size=context.world_size,  # type: ignore[arg-type]
        )
        return Trainer(ours, context, tmp_path).strategy.cut.split  # type: ignore[attr-defined]

    cuts = pool.run(cut_of, tmp_path)
    assert len(set(cuts)) == 1
    assert sum(cuts[0]) == 6


def test_on_an_emulated_processor_layers_are_cut_by_flops_as_predicted_however_long_they_take_here(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A busy machine once cut the layers of an emulated cluster badly, so that its steps took 26% longer."""
    asked = job(model="gpt-nano", strategy="pipeline", world_size=2, batch=ss.Batch(8, micro_batch=2))
    probes = [LayerProbe([], 0, 9.0, 0.0), *(LayerProbe([], 0, 1.0, 6.0) for _ in range(4))]
    layers = [(str(place), nn.Identity()) for place in range(5)]
    monkeypatch.setattr("torch.distributed.broadcast", lambda *_, **__: None)

    def split_on(cluster: Any) -> tuple[int, ...]:
        emulation = None if cluster is None else Emulation(cluster, 0, delays_in_kernel=True)
        context: Any = SimpleNamespace(
            emulation=emulation, rank=0, world_size=2, whole=SimpleNamespace(group=None)
        )
        return _split(asked, layers, probes, 2, context)

    assert split_on(ss.Cluster.emulated(nodes=2, flops="1 GFLOP/s")) == (3, 2)
    assert split_on(ss.Cluster.emulated(nodes=2, slowdown={0: 2.0})) == split_on(None) == (1, 4)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("schedule", ["1f1b", "interleaved"])
def test_a_memory_bound_that_fits_no_stages_is_refused_and_the_one_it_names_does(
    pool: RankPool, tmp_path: Path, schedule: str
) -> None:
    def needs(context: RankContext, bound: float) -> tuple[tuple[int, ...], str]:
        strategy = ss.Pipeline(schedule=schedule, memory_bound=bound)
        ours = job(model=Residual, strategy=strategy, batch=BATCH, world_size=context.world_size)
        try:
            return Trainer(ours, context, tmp_path).strategy.cut.split, ""  # type: ignore[attr-defined]
        except ss.SpecError as error:
            return (), str(error)

    refused = pool.run(lambda context: needs(context, 1000.0), tmp_path)
    assert len(set(refused)) == 1
    assert "fits memory_bound: stage 0 has 1 kB on rank 0" in refused[0][1]
    factor = float(refused[0][1].split("; use ")[1].split(" times")[0])
    cut = pool.run(lambda context: needs(context, 1000.0 * factor), tmp_path)
    assert len(set(cut)) == 1
    assert sum(cut[0][0]) == 6
    assert pool.run(lambda context: needs(context, 980.0 * factor), tmp_path)[0][1]


def test_a_rank_keeps_only_its_own_parameters(pool: RankPool, tmp_path: Path) -> None:
    def held(context: RankContext) -> int:
        ours = job(
            model=Residual, strategy=ss.Pipeline(split="even"), batch=BATCH, world_size=context.world_size
        )
        model = Trainer(ours, context, tmp_path).model
        return sum(p.numel() for p in model.parameters() if p.device.type != "meta")

    sizes = pool.run(held, tmp_path)
    whole = sum(p.numel() for p in Residual().parameters())
    assert sum(sizes) == whole + 256 * 12  # the shared weight lies on two ranks


@pytest.mark.parametrize("microbatches", [4, 8])
def test_several_passes_add_up(pool: RankPool, tmp_path: Path, microbatches: int) -> None:
    ours = job(
        model=Residual, strategy=ss.Pipeline(split="even", microbatches=microbatches), optimizer=ss.Optimizer("adamw"),
        batch=BATCH, world_size=pool.world_size,
    )  # fmt: skip
    results = pool.run(lambda context: train(ours, context), tmp_path)
    losses = results[-1][0]
    alone = oracle_losses(ours)
    assert losses == pytest.approx(alone, rel=1e-9)


def oracle_losses(ours: ss.Job) -> list[float]:
    import tempfile

    from shardscope.runlog.writer import EventWriter
    from shardscope.training.meter import Meter

    with tempfile.TemporaryDirectory() as folder, EventWriter(Path(folder) / "rank-0.jsonl", 0) as events:
        one = ours.replace(strategy="single", world_size=1)
        losses, _ = train(one, RankContext(0, 1, torch.device("cpu"), Meter(), events))
    return losses  # type: ignore[return-value]


def test_fp16_skips_a_step_on_all_ranks_alike(pool: RankPool, tmp_path: Path) -> None:
    def skipped(context: RankContext) -> list[bool]:
        ours = job(
            model=Residual, strategy=ss.Pipeline(split="even"), batch=BATCH, world_size=context.world_size,
            precision="fp16-mixed", clip_norm=1.0,
        )  # fmt: skip
        trainer = Trainer(ours, context, tmp_path)
        seen = []
        for step in range(1, 9):
            poison = torch.inf if step == 1 else 1.0
            result = trainer.strategy.step(
                trainer._micro_batches(step), lambda o, t, poison=poison: trainer.loss_function(o, t) * poison,
                trainer.optimizer,
            )  # fmt: skip
            seen.append(result.skipped)
        assert all(p.isfinite().all() for p in trainer.strategy.full_parameters().values())
        return seen

    first, *others = pool.run(skipped, tmp_path)
    assert first[0]
    assert not first[-1]  # once the scale has come down
    assert others == [first] * (pool.world_size - 1)


def test_fp16_steps_with_a_stage_that_is_frozen(pool: RankPool, tmp_path: Path) -> None:
    num_ranks = pool.world_size

    def frozen_first() -> nn.Module:
        layers = [nn.Linear(64, 64) for _ in range(num_ranks)]
        layers[0].requires_grad_(False)
        return nn.Sequential(nn.Flatten(), *layers)

    def skipped(context: RankContext) -> list[bool]:
        ours = job(
            model=frozen_first, data="digits", strategy=ss.Pipeline(split=(2,) + (1,) * (num_ranks - 1)),
            batch=BATCH, world_size=context.world_size, precision="fp16-mixed", clip_norm=1.0,
            optimizer=ss.Optimizer("lamb", max_grad_norm=0.1),
        )  # fmt: skip
        trainer = Trainer(ours, context, tmp_path)
        results = [
            trainer.strategy.step(trainer._micro_batches(step), trainer.loss_function, trainer.optimizer)
            for step in (1, 2)
        ]
        return [result.skipped for result in results]

    assert pool.run(skipped, tmp_path) == [[False, False]] * pool.world_size


@pytest.mark.parametrize("schedule", ["1f1b", "zbv"])
def test_an_evaluation_is_that_of_the_whole_model(pool: RankPool, tmp_path: Path, schedule: str) -> None:
    from shardscope.training.evaluate import evaluate

    def scores(context: RankContext) -> tuple[dict[str, Any], dict[str, Any]]:
        ours = job(
            model="resnet", data="digits", strategy=ss.Pipeline(schedule=schedule), world_size=context.world_size,
            batch=ss.Batch(80, micro_batch=10),
        )  # fmt: skip
        trainer = Trainer(ours, context, tmp_path)
        trainer.take_step(1)
        mine = evaluate(trainer.strategy, trainer.data.test, trainer.loss_function, trainer._place)
        whole = build_model("resnet", dtype=torch.float64)
        whole.load_state_dict(trainer.strategy.full_parameters())
        x, y = (trainer._place(t) for t in trainer.data.test.batch(torch.arange(mine["samples"])))
        loss = float(trainer.loss_function(whole(x), y))
        return mine, {"loss": loss, "accuracy": float((whole(x).argmax(-1) == y).double().mean())}

    if pool.world_size == 4 and schedule == "zbv":
        pytest.skip("the resnet has eight layers, and one is enough here")
    for mine, whole in pool.run(scores, tmp_path):
        assert mine["loss"] == pytest.approx(whole["loss"], rel=1e-9)
        assert mine["accuracy"] == pytest.approx(whole["accuracy"])


def test_messages_can_pass_through_the_cpu(pool: RankPool, tmp_path: Path) -> None:
    def staged(context: RankContext) -> bool:
        ours = job(
            model=Residual, strategy=ss.Pipeline(split="even"), batch=BATCH, world_size=context.world_size
        )
        losses = []
        for through in (False, True):
            trainer = Trainer(ours, context, tmp_path)
            for stage in trainer.strategy.stages.values():  # type: ignore[attr-defined]
                stage._is_staged = lambda _, through=through: through
            losses.append([trainer.take_step(step) for step in (1, 2, 3)])
        return losses[0] == losses[1]

    assert all(pool.run(staged, tmp_path))
