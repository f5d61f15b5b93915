"""The oracle itself, against what can be worked out by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn

from oracle import plain, updates
from oracle.models import MODELS, Rows

PLAN = plain.Plan(steps=3, batch=4)


def one_weight() -> nn.Module:
    model = nn.Linear(1, 1, bias=False)
    nn.init.constant_(model.weight, 2.0)
    return model


def test_a_step_of_sgd_follows_the_mean_gradient_of_the_batch() -> None:
    data = Rows(torch.full((20, 1), 3.0), torch.full((20, 1), 0.0))
    plan = replace(PLAN, steps=1, workers=2, parts=2, settings={"lr": 0.01})
    trained = plain.train(one_weight, data, "mse", plan)
    assert trained.losses == [36.0]
    assert float(trained.parameters["weight"]) == pytest.approx(2 - 0.01 * 2 * 3 * 6)


@pytest.mark.parametrize("name", ["mlp", "lstm", "tied", "transformer"])
def test_workers_and_micro_batches_change_nothing_without_batch_statistics(name: str) -> None:
    model, data, loss = MODELS[name]
    whole = plain.train(model, data(), loss, replace(PLAN, batch=12))
    cut = plain.train(model, data(), loss, replace(PLAN, batch=12, workers=3, parts=2))
    assert cut.losses == pytest.approx(whole.losses, rel=1e-12)
    assert plain.difference(cut.parameters, whole.parameters) < 1e-12


def test_batch_statistics_are_those_of_a_micro_batch() -> None:
    model, data, loss = MODELS["conv-batchnorm"]
    whole = plain.train(model, data(), loss, replace(PLAN, batch=12))
    cut = plain.train(model, data(), loss, replace(PLAN, batch=12, workers=3))
    assert plain.difference(cut.parameters, whole.parameters) > 1e-6


def test_an_epoch_visits_each_row_once_and_the_next_in_another_order() -> None:
    plan = replace(PLAN, batch=5)
    first, second = ([plain.order(10, plan, step) for step in steps] for steps in ((1, 2), (3, 4)))
    assert (
        torch.cat(first).sort().values.tolist() == torch.cat(second).sort().values.tolist() == list(range(10))
    )
    assert torch.cat(first).tolist() != torch.cat(second).tolist()


def test_mixing_keeps_the_mean_and_brings_the_ranks_together() -> None:
    models = [nn.Linear(2, 1) for _ in range(5)]
    before, apart = plain.mean_parameters(models), float(models[0].weight.detach()[0, 0])
    plain.mix(models)
    assert plain.difference(plain.mean_parameters(models), before) < 1e-6
    for _ in range(100):
        plain.mix(models)
    assert (
        float(models[0].weight.detach()[0, 0])
        == pytest.approx(float(before["weight"][0, 0]), abs=1e-6)
        != apart
    )


def test_clipping_scales_the_gradient_to_the_bound() -> None:
    model = one_weight()
    model.weight.grad = torch.tensor([[30.0]])
    plain.clip(model, 3.0)
    assert float(model.weight.grad) == pytest.approx(3.0, rel=1e-6)


@pytest.mark.parametrize(("name", "moves"), [("lamb", 0.1 * 2.0), ("lars", 0.1 * 1e-3 * 2.0)])
def test_the_first_step_of_a_layerwise_rule_is_a_share_of_the_weights_norm(name: str, moves: float) -> None:
    model = one_weight()
    optimizer = updates.build(name, {"lr": 0.1, "weight_decay": 0.0}, model)
    model.weight.grad = torch.tensor([[5.0]])
    optimizer.step()
    assert float(model.weight.detach()) == pytest.approx(2.0 - moves, rel=1e-6)


def test_a_warm_up_rises_to_the_full_rate_and_a_linear_schedule_falls_after_it() -> None:
    plan = replace(PLAN, steps=6, schedule="linear", shape={"warmup_steps": 2})
    assert [plain.rate(plan, step) for step in range(1, 7)] == [0.5, 1.0, 1.0, 0.75, 0.5, 0.25]


def test_not_a_number_is_no_small_difference() -> None:
    numbers = {"w": torch.tensor([1.0, 2.0])}
    assert plain.difference({"w": torch.tensor([float("nan"), 2.0])}, numbers) == float("inf")
    assert plain.losses_apart([0.5, float("nan")], [0.5, 0.4]) == float("inf")
