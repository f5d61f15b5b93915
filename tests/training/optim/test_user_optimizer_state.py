"""State of user-defined optimizers: saved without a step, restored to the bit, or refused before step 1."""

from __future__ import annotations

import copy
import json
import random
from collections import deque
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import shardscope as ss
from conformance.alone import Never
from conformance.ranks import RankPool
from shardscope.errors import CheckpointError, SpecError
from shardscope.runlog.writer import EventWriter
from shardscope.training.checkpoint.optimizer_state import digested
from shardscope.training.checkpoint.values import encode
from shardscope.training.context import RankContext
from shardscope.training.meter import Meter
from shardscope.training.optim.state import alike
from shardscope.training.optim.user_defined import random_numbers_of
from shardscope.training.random_state import seed_everything
from shardscope.training.trainer import Trainer
from training.optim.user_optimizers import KINDS, SETTINGS, ByName, UserOptimizer

REFUSED = {
    "HiddenObject": "attribute 'clock'",
    "PerLayer": "attribute 'hidden'",
    "ObjectEntry": "entry 'clock' of parameter",
    "SharedMemory": "entry 'b' of parameter '1.weight'",
    "OrderedEntry": "entry 'by' of parameter '1.weight' is a OrderedDict",
    "Cyclic": "its state contains itself",
}
NOT_ALONE = ("NoRate", "WithClosure", "TensorState", "SumsGradients", "SumsMatrices")
ON_RANKS = ("PythonStep", "Columns", "Largest", "EveryForm", "Unusual")
STRATEGIES = ("ring", "zero-1", "zero-2", "zero-3", "pipeline")


def model() -> nn.Module:
    return nn.Sequential(
        nn.Flatten(),
        nn.Linear(64, 6),
        nn.Tanh(),
        nn.Linear(6, 7),
        nn.Tanh(),
        nn.Linear(7, 5),
        nn.Linear(5, 10),
    )


def trained(
    context: RankContext, folder: Path, kind: str, strategy: str, after: Path | None = None, **changes: Any
) -> Trainer:
    split: Any = ss.Strategy("pipeline", split="even") if strategy == "pipeline" else strategy
    job = ss.Job(
        strategy=split, world_size=context.world_size, steps=4, precision="fp64",
        batch=ss.Batch(24, micro_batch=3) if strategy == "pipeline" else 24,
        **{"model": model, "data": "digits", "optimizer": UserOptimizer(type_name=kind), **changes},
    )  # fmt: skip
    folder.mkdir(parents=True, exist_ok=True)
    trainer = Trainer(job, context, folder)
    if after is not None:
        trainer.resume(after)
    trainer.train(Never())
    return trainer


def alone(folder: Path) -> RankContext:
    return RankContext(0, 1, torch.device("cpu"), Meter(), EventWriter(folder / "rank-0.jsonl", 0))


def folder_of(path: Path) -> Path:
    path.mkdir(parents=True)
    return path


def found(trainer: Trainer) -> list[Any]:
    """Weights, and everything that the optimizer keeps but the learning rate."""
    named = trainer.strategy.named_optimizer(trainer.optimizer)
    assert named is not None
    state = trainer.optimizer.state_dict()
    groups = [{key: value for key, value in group.items() if key != "lr"} for group in state["param_groups"]]
    return [
        *(p.detach() for p in named.parameters.values()),
        {**state, "param_groups": groups},
        named.sections(),
    ]


def holds(context: RankContext, folder: Path, kind: str, strategy: str) -> str:
    """Check that a save changes nothing and that a resumed run ends at the same bits; return how it is refused."""
    plain = found(trained(context, folder / "plain", kind, strategy))
    try:
        saved = found(trained(context, folder / "saved", kind, strategy, checkpoint=2))
    except SpecError as error:
        return str(error)
    rest = found(trained(context, folder / "rest", kind, strategy, folder / "saved/checkpoints/step-2"))
    assert alike(plain, saved), f"{kind} under {strategy}: saving has changed it"
    assert alike(plain, rest), f"{kind} under {strategy}: it is resumed otherwise"
    return ""


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind not in NOT_ALONE])
def test_on_one_process_a_resumed_optimizer_ends_at_the_same_bits_or_is_refused_by_name(
    tmp_path: Path, kind: str
) -> None:
    refused = holds(alone(tmp_path), tmp_path, kind, "single")
    assert REFUSED.get(kind, "") in refused
    assert bool(refused) == (kind in REFUSED)


@pytest.mark.slow
@pytest.mark.sampled
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_on_several_ranks_a_resumed_optimizer_ends_at_the_same_bits(
    pool: RankPool, tmp_path: Path, strategy: str
) -> None:
    def body(context: RankContext) -> list[str]:
        return [holds(context, tmp_path / kind, kind, strategy) for kind in ON_RANKS]

    for refused in pool.run(body, tmp_path):
        assert not any(refused)


def resumed(context: RankContext, folder: Path, kind: str, strategy: str, after: Path) -> str:
    """Return how a run is refused that goes on from the checkpoint of another strategy."""
    try:
        trained(context, folder, kind, strategy, after)
    except CheckpointError as error:
        return str(error)
    return ""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("first", "then"), [("ring", "zero-1"), ("zero-3", "pipeline"), ("pipeline", "zero-2")]
)
def test_another_strategy_resumes_all_state_that_it_can_hold_and_refuses_the_rest_by_name(
    pool: RankPool, tmp_path: Path, first: str, then: str
) -> None:
    def body(context: RankContext) -> dict[str, str]:
        told = {}
        for kind in ON_RANKS:
            trained(context, tmp_path / kind, kind, first, checkpoint=2)
        for kind in ON_RANKS:
            told[kind] = resumed(
                context, tmp_path / kind / then, kind, then, tmp_path / kind / "checkpoints/step-2"
            )
        return {kind: text for kind, text in told.items() if text}

    for told in pool.run(body, tmp_path):
        assert told.keys() == {"Columns"}, told
        assert "entry 'columns' of parameter" in told["Columns"]


@pytest.mark.parametrize(
    ("kind", "strategy", "reason"),
    [
        ("Columns", "zero-1", "entry 'columns' of parameter '1.weight' depends on the parameters of a rank"),
        ("Matrices", "zero-3", "entry 'held' of parameter '1.weight' depends on the parameters of a rank"),
    ],
)
def test_what_no_other_number_of_ranks_could_resume_is_refused_before_the_first_step(
    pool: RankPool, tmp_path: Path, kind: str, strategy: str, reason: str
) -> None:
    def body(context: RankContext) -> str:
        with pytest.raises(SpecError) as refused:
            trained(context, tmp_path, kind, strategy, elastic="2:4")
        return str(refused.value)

    for told in pool.run(body, tmp_path):
        assert reason in told
    assert '"event": "step"' not in (tmp_path / "rank-0.jsonl").read_text()


@pytest.mark.sampled
@pytest.mark.parametrize("strategy", ["ring", "tree", "hierarchical", "zero-1", "zero-3"])
def test_random_numbers_of_a_step_are_the_same_on_ranks_with_a_copy_of_the_parameters(
    pool: RankPool, tmp_path: Path, strategy: str
) -> None:
    def body(context: RankContext) -> tuple[list[Any], str]:
        trainer = trained(context, tmp_path / "plain", "Drawing", strategy)
        copies = [] if trainer.strategy.holding.is_split else [p.detach() for p in trainer.model.parameters()]
        return copies, holds(context, tmp_path, "Drawing", strategy)

    told = pool.run(body, tmp_path)
    assert all(alike(copies, told[0][0]) for copies, _ in told)
    assert not any(refused for _, refused in told)


def test_random_numbers_outside_the_steps_are_drawn_as_without_them() -> None:
    def drawn() -> list[float]:
        return [float(torch.rand(())), random.random(), float(np.random.rand())]  # noqa: NPY002

    def inside(step: int) -> list[float]:
        with random_numbers_of(lambda: [7, step], torch.device("cpu")):
            return drawn()

    seed_everything(3)
    expected = drawn() + drawn()
    seed_everything(3)
    first, told = drawn(), inside(1)
    assert first + drawn() == expected
    assert inside(1) == told
    assert not {*inside(2)} & {*told}


@pytest.mark.sampled
@pytest.mark.parametrize("strategy", ["zero-1", "zero-2", "zero-3"])
def test_an_optimizer_that_fails_on_empty_pieces_trains_without_them(
    pool: RankPool, tmp_path: Path, strategy: str
) -> None:
    record = ss.Record(parameters=True)
    trained(alone(tmp_path), tmp_path / "alone", "Largest", "single", record=record)

    def body(context: RankContext) -> bool:
        trainer = trained(context, tmp_path / "plain", "Largest", strategy, record=record)
        return any(p.numel() == 0 for p in trainer.optimizer.param_groups[0]["params"])

    has_empty = pool.run(body, tmp_path)
    assert any(has_empty) or strategy != "zero-1"
    with (
        np.load(tmp_path / "alone/parameters.npz") as one,
        np.load(tmp_path / "plain/parameters.npz") as other,
    ):
        for name in one.files:
            if one[name].dtype == np.float64:
                # a largest element of a piece is not that of the tensor, but the optimizer multiplies it by 0
                assert np.abs(one[name] - other[name]).max(initial=0) < 1e-12


@pytest.mark.parametrize("changes", [{}, {"checkpoint": 2}, {"elastic": "2:4"}], ids=str)
def test_an_optimizer_that_cannot_update_pieces_is_refused_by_all_ranks_before_the_first_step(
    pool: RankPool, tmp_path: Path, changes: dict[str, Any]
) -> None:
    def body(context: RankContext) -> str:
        with pytest.raises(SpecError) as refused:
            trained(context, tmp_path, "Whole", "zero-1", **changes)
        return str(refused.value)

    for told in pool.run(body, tmp_path):
        assert "optimizer='user-kind' cannot train with strategy='zero-1'" in told
        assert "RuntimeError: a vector of" in told
    assert '"event": "step"' not in (tmp_path / "rank-0.jsonl").read_text()


@pytest.mark.sampled
@pytest.mark.parametrize("strategy", ["ring", "zero-1", "zero-2", "zero-3", "pipeline"])
def test_an_optimizer_may_keep_gradients_whose_memory_a_strategy_uses_again(
    pool: RankPool, tmp_path: Path, strategy: str
) -> None:
    record = ss.Record(parameters=True)
    trained(alone(tmp_path), tmp_path / "alone", "KeepsGradient", "single", record=record)

    def body(context: RankContext) -> str:
        trained(context, tmp_path / "ranks", "KeepsGradient", strategy, record=record)
        return holds(context, tmp_path, "KeepsGradient", strategy)

    assert not any(pool.run(body, tmp_path))
    assert largest_difference(tmp_path / "alone", tmp_path / "ranks") < 1e-12


def largest_difference(one: Path, other: Path) -> float:
    """Of the parameters that two runs have recorded."""
    with np.load(one / "parameters.npz") as a, np.load(other / "parameters.npz") as b:
        return max(np.abs(a[name] - b[name]).max() for name in a.files if a[name].dtype == np.float64)


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("kind", "strategy", "call"),
    [
        ("SumsGradients", "pipeline", "allreduce"), ("SumsGradients", "zero-1", "allreduce"),
        ("SumsGradients", "zero-3", "allreduce"), ("SumsMatrices", "pipeline", "allreduce"),
        ("SumsNorm", "pipeline", None), ("SumsNorm", "zero-1", None), ("SumsGradients", "ring", None),
    ],
)  # fmt: skip
def test_steps_that_combine_different_parameters_of_ranks_are_refused_before_the_first(
    pool: RankPool, tmp_path: Path, kind: str, strategy: str, call: str | None
) -> None:
    def body(context: RankContext) -> str:
        try:
            return holds(context, tmp_path, kind, strategy)
        except SpecError as error:
            return str(error)

    for told in pool.run(body, tmp_path):
        assert bool(told) == (call is not None)
        assert call is None or f"combine them with torch.distributed ({call})" in told
    assert call is None or '"event": "step"' not in (tmp_path / "rank-0.jsonl").read_text()


@pytest.mark.parametrize("setting", SETTINGS)
def test_settings_that_cannot_be_copied_change_nothing(pool: RankPool, tmp_path: Path, setting: str) -> None:
    def body(context: RankContext) -> None:
        trained(context, tmp_path, "", "ring", optimizer=ByName(setting=setting))
        if setting != "generator":  # which has a state that cannot be saved
            trained(context, tmp_path, "", "ring", optimizer=ByName(setting=setting), checkpoint=2)

    pool.run(body, tmp_path)


def test_a_build_method_may_ask_for_parameters_by_name(tmp_path: Path) -> None:
    folder = tmp_path / "named"
    trained(alone(folder_of(folder)), folder, "", "single", optimizer=ByName(), checkpoint=2)
    assert "optimizer_note" not in (folder / "rank-0.jsonl").read_text()
    folder = tmp_path / "fussy"
    trained(alone(folder_of(folder)), folder, "", "single", optimizer=ByName(is_fussy=True), checkpoint=2)
    assert "ValueError: the last layer has 10 rows" in (folder / "rank-0.jsonl").read_text()


@pytest.mark.parametrize("strategy", ["zero-1", "zero-2", "zero-3"])
@pytest.mark.parametrize(("kind", "is_refused"), [("PythonStep", False), ("PerLayer", True)])
def test_ranks_with_only_empty_pieces_agree_with_the_others(
    pool: RankPool, tmp_path: Path, strategy: str, kind: str, *, is_refused: bool
) -> None:
    def body(context: RankContext) -> bool:
        try:
            trained(
                context, tmp_path, kind, strategy, checkpoint=2, loss="mse",
                model=lambda: nn.Linear(6, 1, bias=False), data=six_columns,
            )  # fmt: skip
        except SpecError as refused:
            return "attribute 'hidden'" in str(refused)
        return False

    assert pool.run(body, tmp_path) == [is_refused] * pool.world_size


def six_columns() -> Any:
    inputs = torch.arange(480, dtype=torch.float64).reshape(80, 6) / 480
    return torch.utils.data.TensorDataset(inputs, inputs[:, :1])


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        ("NoRate", "a parameter group of its NoRate has no 'lr'"),
        ("WithClosure", "WithClosure needs a closure"),
        ("TensorState", "a Tensor, not a dictionary, as the state"),
    ],
)
def test_an_optimizer_that_no_job_that_saves_can_train_with_is_refused_by_name(
    tmp_path: Path, kind: str, reason: str
) -> None:
    with pytest.raises(SpecError, match=reason):
        trained(alone(tmp_path), tmp_path, kind, "single", checkpoint=2)


@pytest.mark.parametrize("kind", ["HiddenObject", "ObjectEntry"])
def test_a_job_that_saves_nothing_trains_with_any_optimizer(tmp_path: Path, kind: str) -> None:
    trained(alone(tmp_path), tmp_path, kind, "single")


def test_settings_of_the_job_win_over_those_of_the_run_that_saved(tmp_path: Path) -> None:
    context = alone(tmp_path)
    trained(context, tmp_path / "saved", "GroupCounter", "single", checkpoint=2)
    rest = UserOptimizer(type_name="GroupCounter", lr=0.5)
    trainer = trained(
        context,
        tmp_path / "rest",
        "GroupCounter",
        "single",
        tmp_path / "saved/checkpoints/step-2",
        optimizer=rest,
    )
    group = trainer.optimizer.param_groups[0]
    assert (group["lr"], group["betas"], group["k"]) == (0.5, (0.9, 0.99), 4)


ENTRIES: list[Any] = [
    torch.zeros(4), torch.zeros(2, 2), torch.zeros(4, dtype=torch.float64), torch.tensor([0.0, 0.0, 0.0, -0.0]),
    torch.full((4,), torch.nan), [torch.zeros(4)], (torch.zeros(4),), {"a": torch.zeros(4)}, {"b": torch.zeros(4)},
    deque([torch.zeros(4)]), deque([torch.zeros(4)], 3), torch.zeros(8)[::2] + 1, 0, 0.0, "text", None,
]  # fmt: skip


def test_ranks_tell_entries_apart_by_their_bits_without_writing_them_out() -> None:
    def told(value: Any) -> str:
        return json.dumps(encode("entry", digested(value)))

    assert len({told(value) for value in ENTRIES}) == len(ENTRIES)
    assert all(told(value) == told(copy.deepcopy(value)) for value in ENTRIES)
    assert len(told({"seen": [torch.zeros(100_000)]})) < 200
