"""Training and evaluation with targets that do not count: as one process on the whole batch, however it is cut."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from threading import Lock
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional

import shardscope as ss
from conformance import counted
from conformance.alone import Never, trainer_in
from conformance.ranks import RankPool
from shardscope.errors import DataError
from shardscope.runlog.schema import Moved
from shardscope.runtime.tools.check import check
from shardscope.training.loss import resolve_loss, zero_of
from shardscope.training.loss_weights import TRAFFIC
from shardscope.training.trainer import Trainer, TrainingError

STRATEGIES = ["ring", "all-reduce", "tree", "hierarchical", "zero-1", "zero-2", "zero-3", "parameter-server"]


def alone(job: ss.Job, folder: Path) -> Trainer:
    return trainer_in(folder, **{**dict(job), "checkpoint": ss.Checkpoint()})


def cut(case: counted.Case, folder: Path, pool: RankPool, strategy: Any, micro_batch: int) -> None:
    ours = case.job(strategy, pool.world_size, micro_batch)
    results = pool.run(lambda context: counted.trained(ours, context), folder)
    apart = counted.apart(results, counted.uncut(case))
    assert max(apart.values()) < case.bound, apart


@pytest.mark.sampled
@pytest.mark.parametrize("name", counted.CASES)
def test_one_process_may_cut_a_batch_as_it_likes(name: str, tmp_path: Path) -> None:
    case = counted.CASES[name]
    expected = counted.uncut(case)
    for micro_batch in (None, 2):
        trainer = alone(case.job("single", 1, micro_batch), tmp_path / str(micro_batch))
        apart = counted.apart([counted.trained_by(trainer)], expected)
        assert max(apart.values()) < case.bound, (micro_batch, apart)


@pytest.mark.parametrize("name", counted.CASES)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_ranks_train_and_evaluate_as_one_process_does_on_the_whole_batch(
    pool: RankPool, tmp_path: Path, strategy: str, name: str
) -> None:
    cut(counted.CASES[name], tmp_path, pool, strategy, 2)


@pytest.mark.parametrize("name", [name for name, case in counted.CASES.items() if case.can_be_cut])
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "interleaved", "zero-bubble"])
def test_a_pipeline_weights_its_micro_batches(
    pool: RankPool, tmp_path: Path, schedule: str, name: str
) -> None:
    strategy = ss.Pipeline(schedule=schedule)
    cut(counted.CASES[name], tmp_path, pool, strategy, counted.BATCH // (2 * pool.world_size))


def everyone() -> tuple[Tensor, Tensor]:
    x, y = counted.classes()
    return x, y.clamp(min=0)


@pytest.mark.parametrize(
    ("case", "is_exchanged"),
    [
        (counted.Case(counted.mlp, everyone), False),
        (counted.CASES["classes"], True),
        (counted.CASES["sum"], False),
    ],
    ids=["all count", "some do not", "a sum"],
)
def test_counts_are_exchanged_only_where_targets_can_be_left_out(
    pool: RankPool, tmp_path: Path, case: counted.Case, is_exchanged: bool
) -> None:
    ours = case.job("ring", pool.world_size, 2)
    pool.run(lambda context: counted.trained(ours, context), tmp_path)
    steps = [json.loads(line) for line in (tmp_path / "rank-1.jsonl").read_text().splitlines()]
    sent = [event["traffic"] for event in steps if event["event"] == "step"]
    assert len(sent) == counted.STEPS
    assert all((TRAFFIC in traffic) is is_exchanged for traffic in sent)
    assert sum(Moved.of(event).sent_bytes for event in steps if event["event"] == "step") == sum(
        row["sent_bytes"] for traffic in sent for name, row in traffic.items() if name != TRAFFIC
    )


def all_ignored() -> tuple[Tensor, Tensor]:
    x, y = counted.classes()
    return x, torch.full_like(y, -100)


def test_a_batch_without_any_target_is_refused_by_that_name(tmp_path: Path) -> None:
    trainer = trainer_in(tmp_path, model=counted.mlp, data=all_ignored, batch=8)
    with pytest.raises(
        DataError, match=r"no target of the global batch of step 1 counts .* every target is -100"
    ):
        trainer.train(Never())


def ignoring(output: Tensor, target: Tensor) -> Tensor:
    return functional.cross_entropy(output.flatten(0, -2), target.flatten())


def summed(output: Tensor, target: Tensor) -> Tensor:
    return functional.mse_loss(output, target.double()[:, None].expand_as(output), reduction="sum")


def contrasted(output: Tensor, target: Tensor) -> Tensor:
    return functional.cross_entropy(output @ output.t(), torch.arange(len(output)))


def few_ignored() -> tuple[Tensor, Tensor]:
    x, y = counted.classes()
    return x, y.clamp(min=0).masked_fill(torch.arange(len(y)) % 7 == 0, -100)


@pytest.mark.parametrize(
    ("loss", "data"), [(ignoring, few_ignored), (summed, counted.classes), (contrasted, counted.classes)]
)
def test_a_loss_of_the_users_that_depends_on_the_cut_is_told(loss: Any, data: Any, tmp_path: Path) -> None:
    trainer = trainer_in(
        tmp_path, model=counted.mlp, data=data, loss=loss, batch=ss.Batch(24, micro_batch=12)
    )
    assert f"loss={loss.__name__!r} of some rows is not the mean" in str(trainer.weights.note)


class MaskedInside(nn.Module):
    """Computes its loss itself, without the padding that its mask marks; no label is -100."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.tagger, self.kind = counted.tagger(), kind

    def forward(self, input_ids: Tensor, mask: Tensor, labels: Tensor) -> Any:
        losses = functional.cross_entropy(self.tagger(input_ids).transpose(1, 2), labels, reduction="none")
        loss = (losses * mask).sum() / mask.sum()
        return {"mapping": {"loss": loss}, "tuple": (loss,), "tensor": loss}[self.kind]


def without_ignored() -> dict[str, Tensor]:
    x, y = counted.padded()
    y[:, 0] = 1
    return {"input_ids": x, "mask": (y >= 0).double(), "labels": y.clamp(min=0)}


@pytest.mark.parametrize(
    ("kind", "loss"),
    [
        ("mapping", "cross-entropy"),
        ("mapping", lambda output, _: output["loss"]),
        ("tuple", lambda output, _: output[0]),
        ("tensor", lambda output, _: output),
    ],
)
def test_a_model_that_leaves_out_its_padding_itself_is_told(kind: str, loss: Any, tmp_path: Path) -> None:
    case = counted.Case(partial(MaskedInside, kind), without_ignored, loss)
    trainer = alone(case.job("single", 1, 4), tmp_path)
    assert "of some rows is not the mean of its values for parts" in str(trainer.weights.note)


def sorted_classes() -> tuple[Tensor, Tensor]:
    x, y = counted.classes()
    return x, y.clamp(min=0).sort().values


def last_ignored() -> tuple[Tensor, Tensor]:
    x, y = counted.classes()
    return x, y.clamp(min=0).masked_fill(torch.arange(len(y)) == len(y) - 2, -100)


def zeros_ignored() -> tuple[Tensor, Tensor]:
    x, y = counted.padded()
    y[:40] = -100
    return x, y.clamp(min=0)


def with_weights(output: Tensor, target: Tensor) -> Tensor:
    return functional.cross_entropy(output, target, weight=torch.tensor([5.0, 1, 1, 2], dtype=torch.float64))


def without_zeros(output: Tensor, target: Tensor) -> Tensor:
    return functional.cross_entropy(output.flatten(0, -2), target.flatten(), ignore_index=0)


@pytest.mark.parametrize(
    ("model", "data", "loss"),
    [
        (counted.mlp, sorted_classes, with_weights),
        (counted.mlp, last_ignored, ignoring),
        (counted.tagger, zeros_ignored, without_zeros),
    ],
)
def test_the_rows_on_which_a_loss_is_tried_are_not_all_alike(
    model: Any, data: Any, loss: Any, tmp_path: Path
) -> None:
    trainer = alone(counted.Case(model, data, loss).job("single", 1, 4), tmp_path)
    assert f"loss={loss.__name__!r} of some rows is not the mean" in str(trainer.weights.note)


@pytest.mark.parametrize(
    ("smoothing", "weights", "is_told"),
    [(0.1, [0.0, 1, 1, 2], True), (0.0, [0.0, 1, 1, 2], False), (0.1, [1.0] * 4, False)],
)
def test_smoothed_targets_without_weight_are_told(
    smoothing: float, weights: list[float], is_told: bool, tmp_path: Path
) -> None:
    options: Any = {"weight": torch.tensor(weights, dtype=torch.float64), "label_smoothing": smoothing}
    for loss in (nn.CrossEntropyLoss(**options), partial(functional.cross_entropy, **options)):
        job = counted.Case(counted.mlp, sorted_classes, loss).job("single", 1, 1)
        note = alone(job, tmp_path).weights.note
        assert ("by label smoothing" in str(note)) is is_told


class Noisy(nn.Module):
    """Draws random numbers in evaluation mode, too, as variational autoencoders may."""

    def __init__(self) -> None:
        super().__init__()
        self.mlp = counted.mlp()

    def forward(self, x: Tensor) -> Tensor:
        return self.mlp(x + torch.randn_like(x))


def mean_over_rows(output: Tensor, target: Tensor) -> Tensor:
    return functional.cross_entropy(output, target.clamp(min=0))


def test_random_numbers_and_few_bits_are_not_taken_for_a_dependence_on_the_cut(tmp_path: Path) -> None:
    noisy = alone(counted.Case(Noisy, sorted_classes, mean_over_rows).job("single", 1, 4), tmp_path / "noisy")
    job = counted.Case(counted.mlp, sorted_classes, mean_over_rows).job("single", 1, 4, precision="bf16")
    assert noisy.weights.note is None
    assert alone(job, tmp_path / "bf16").weights.note is None


def test_a_mean_over_no_targets_is_not_blamed_on_the_learning_rate_alone(tmp_path: Path) -> None:
    case = counted.Case(counted.tagger, zeros_ignored, without_zeros)
    with pytest.raises(
        TrainingError, match="set the loss's attribute count, if a micro-batch may have no target"
    ):
        alone(case.job("single", 1, 1), tmp_path).train(Never())


def test_a_mean_over_rows_needs_no_note(tmp_path: Path) -> None:
    def plain(output: Tensor, target: Tensor) -> Tensor:
        return functional.cross_entropy(output, target.clamp(min=0))

    trainer = trainer_in(tmp_path, model=counted.mlp, data=counted.classes, loss=plain, batch=8)
    assert trainer.weights.note is None


class WithAnotherTerm(counted.OwnLoss):
    """Adds to its loss what has no targets, as models with experts do."""

    def forward(self, input_ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
        output = super().forward(input_ids, labels)
        return {**output, "loss": output["loss"] + 1e-3 * output["logits"].square().mean()}


class Uniform(counted.OwnLoss):
    """All classes cost the same at first."""

    def __init__(self) -> None:
        super().__init__()
        nn.init.zeros_(self.head.weight)


def test_a_models_own_loss_that_is_more_than_cross_entropy_is_told(tmp_path: Path) -> None:
    trainer = alone(counted.Case(WithAnotherTerm, counted.two_columns).job("single", 1, 2), tmp_path)
    assert "the model's own loss is not the mean cross-entropy" in str(trainer.weights.note)


def test_the_shift_of_labels_is_found_before_training_although_all_classes_cost_the_same(
    tmp_path: Path,
) -> None:
    trainer = alone(counted.Case(Uniform, counted.two_columns).job("single", 1, 2), tmp_path)
    assert trainer.weights.count is not None
    assert trainer.weights.count(torch.tensor([[3, -100, 4]])) == 1


def of_the_model(output: dict[str, Tensor], target: Tensor) -> Tensor:
    return output["loss"]


def scaled(output: dict[str, Tensor], target: Tensor) -> Tensor:
    return 2 * output["loss"]


def test_a_function_that_returns_the_models_own_loss_needs_no_count(tmp_path: Path) -> None:
    case = counted.Case(counted.OwnLoss, counted.two_columns, of_the_model)
    expected = counted.uncut(counted.CASES["own loss"])
    apart = counted.apart([counted.trained_by(alone(case.job("single", 1, 2), tmp_path))], expected)
    assert max(apart.values()) < case.bound


def test_a_function_of_the_models_own_loss_whose_count_is_unknown_is_told(tmp_path: Path) -> None:
    trainer = alone(counted.Case(counted.OwnLoss, counted.two_columns, scaled).job("single", 1, 12), tmp_path)
    assert "loss='scaled' of some rows is not the mean of its values for parts" in str(trainer.weights.note)


@given(counts=st.lists(st.integers(0, 5), min_size=1, max_size=8), seed=st.integers(0, 99))
@pytest.mark.parametrize("weight", [None, torch.tensor([0.0, 1.0, 2.5])])
def test_weighted_parts_add_up_to_the_whole(counts: list[int], seed: int, weight: Tensor | None) -> None:
    generator = torch.Generator().manual_seed(seed)
    scores = torch.randn(len(counts), 5, 3, generator=generator, dtype=torch.float64)
    target = torch.randint(3, (len(counts), 5), generator=generator)
    target[torch.arange(5) >= torch.tensor(counts)[:, None]] = -100
    weight = None if weight is None else weight.double()
    loss = resolve_loss(partial(functional.cross_entropy, weight=weight))
    assert loss.count is not None
    parts = [(loss.count(y), loss(x, y)) for x, y in zip(scores, target, strict=True)]
    total = sum(count for count, _ in parts)
    if total:
        whole = loss(scores.flatten(0, 1), target.flatten())
        assert float(sum(value * count for count, value in parts if count)) == pytest.approx(
            float(whole) * total
        )


@pytest.mark.parametrize("value", [-1, float("nan"), "two", torch.ones(2)])
def test_a_count_that_is_no_number_is_refused(value: Any) -> None:
    def loss(output: Tensor, target: Tensor) -> Tensor:
        return output.mean()

    loss.count = lambda target: value  # type: ignore[attr-defined]
    resolved = resolve_loss(loss)
    assert resolved.count is not None
    with pytest.raises(DataError, match="loss=loss: its count returned"):
        resolved.count(torch.ones(2))


class TestCheck:
    @pytest.mark.sampled
    @pytest.mark.parametrize("loss", [ignoring, summed, contrasted])
    def test_a_loss_whose_weight_depends_on_the_cut_fails_and_is_named(self, loss: Any) -> None:
        data = few_ignored if loss is ignoring else counted.classes
        case = counted.Case(counted.mlp, data, loss, scale=0.01)
        report = check(case.job("ring", 2, 6), 2)
        assert report.passed is False
        assert "depends on how the batch is split" in report.verdict
        assert f"loss={loss.__name__!r}" in report.verdict
        assert len(report.runs) == 3

    @pytest.mark.slow
    @pytest.mark.sampled
    @pytest.mark.parametrize("name", ["classes", "states its count"])
    def test_a_loss_that_states_its_count_passes(self, name: str) -> None:
        report = check(
            counted.CASES[name].job("ring", 2, 2, batch=ss.Batch(24, micro_batch=2, shares=(16, 8))), 2
        )
        assert report.passed, report.verdict
        assert report.cut_difference is not None
        assert report.cut_difference < 1e-9


class FailsInEvaluationOnOneRank(counted.OwnLoss):
    """Only training mode works on rank 1, as with a kernel that is missing there."""

    def forward(self, input_ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
        if not self.training and torch.distributed.is_initialized() and torch.distributed.get_rank() == 1:
            raise OSError("no evaluation here")
        return super().forward(input_ids, labels)


def weights_and_losses(job: ss.Job, context: Any) -> tuple[Any, str | None, int]:
    trainer = Trainer(job, context, context.events.path.parent)
    for step in range(1, job.steps + 1):
        trainer.take_step(step)
    traffic = [json.loads(line) for line in context.events.path.read_text().splitlines()]
    trainer.strategy.close()
    exchanged = sum(TRAFFIC in event["traffic"] for event in traffic if event["event"] == "step")
    return trainer.weights.count, trainer.weights.note, exchanged


@pytest.mark.parametrize("loss", ["cross-entropy", of_the_model])
def test_a_trial_that_fails_on_one_rank_is_told_on_all_and_does_not_hang(
    pool: RankPool, tmp_path: Path, loss: Any
) -> None:
    case = counted.Case(FailsInEvaluationOnOneRank, counted.two_columns, loss)
    ours = case.job("ring", pool.world_size, 2)
    for count, note, exchanged in pool.run(lambda context: weights_and_losses(ours, context), tmp_path):
        assert count is None
        assert "rank 1: the model or loss could not be tried" in str(note)
        assert exchanged == 0


class Focal(nn.CrossEntropyLoss):
    """A mean over rows whose class weights are not its divisor."""

    def forward(self, scores: Tensor, target: Tensor) -> Tensor:
        cost = functional.cross_entropy(scores, target, weight=self.weight, reduction="none")
        return ((1 - (-cost).exp()) ** 2 * cost).mean()


class Renamed(nn.CrossEntropyLoss):
    pass


def test_a_subclass_counts_as_pytorchs_only_if_it_computes_the_same() -> None:
    weight = torch.tensor([1.0, 5.0, 20.0])
    assert resolve_loss(Focal(weight)).count is None
    assert resolve_loss(Renamed(weight)).count is not None
    assert resolve_loss(nn.NLLLoss(weight)).count is not None


class SaysItIsASum(nn.CrossEntropyLoss):
    def forward(self, scores: Tensor, target: Tensor) -> Tensor:
        return functional.cross_entropy(scores, target.clamp(min=0))


def test_a_loss_that_says_it_is_a_sum_and_is_none_is_told(tmp_path: Path) -> None:
    job = {"model": counted.mlp, "data": counted.classes, "batch": 12}
    trainer = trainer_in(tmp_path, loss=SaysItIsASum(reduction="sum"), **job)
    assert "has reduction='sum', but" in str(trainer.weights.note)


class CountsItsCalls:
    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, output: Tensor, target: Tensor) -> Tensor:
        self.calls += 1
        return functional.cross_entropy(output, target.clamp(min=0)) / self.calls


def with_state(state: CountsItsCalls) -> Any:
    def loss(output: Tensor, target: Tensor) -> Tensor:
        return state(output, target)

    return loss


@pytest.mark.parametrize("wrapped", [lambda s: s, with_state, lambda s: s.__call__, partial])
def test_trying_a_loss_leaves_its_state_alone(wrapped: Any, tmp_path: Path) -> None:
    state = CountsItsCalls()
    trainer_in(tmp_path, model=counted.mlp, data=counted.classes, loss=wrapped(state), batch=12)
    assert state.calls == 0


def test_a_loss_that_cannot_be_copied_is_not_tried(tmp_path: Path) -> None:
    lock, called = Lock(), []

    def loss(output: Tensor, target: Tensor) -> Tensor:
        with lock:
            called.append(1)
            return functional.cross_entropy(output, target)

    trainer = trainer_in(tmp_path, model=counted.mlp, data=few_ignored, loss=loss, batch=12)
    assert not called
    assert "some targets are -100" in str(trainer.weights.note)


def test_a_part_without_targets_whose_model_returns_nothing_with_gradients_is_refused_by_name() -> None:
    output = {"loss": torch.zeros((), requires_grad=True), "logits": torch.zeros(2, 3)}
    with pytest.raises(DataError, match="no target of micro-batch 3 counts.*return the logits"):
        zero_of(output, 2)
    assert not zero_of({**output, "logits": torch.ones(2, 3, requires_grad=True)}, 2)


def test_a_users_loss_on_shards_is_told_that_it_was_not_tried(tmp_path: Path) -> None:
    x, y = (part.numpy() for part in counted.classes())
    ss.write_shards(tmp_path / "shards", (x, y), shard_size=2000)
    data = ss.Shards(str(tmp_path / "shards"))
    trainer = trainer_in(tmp_path, model=counted.mlp, data=data, loss=ignoring, batch=12)
    assert "is not tried on shards" in str(trainer.weights.note)
