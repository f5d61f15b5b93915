from __future__ import annotations

import copy
import itertools

import pytest
import pytorch_optimizer
import torch
from torch import nn

from shardscope.errors import SpecError
from shardscope.methods.optimizers.lars._torch import TorchLars
from training.optim.problems import gradients, parameters, run, step, worst_difference
from training.optim.reference import LarsReference

TOLERANCE = {torch.float32: 1e-6, torch.float64: 1e-12}
FORMS = list(itertools.product(["classic", "torch", "post"], ["parts", "sum"], [False, True]))
OTHERS = {
    "LARC": {"trust_clip": True, "lr": 1e-3, "trust_coefficient": 2e-2},
    "eps": {"eps": 1e-2},
    "no momentum": {"momentum": 0.0},
    "no decay": {"weight_decay": 0.0},
    "no decay, looking ahead": {"weight_decay": 0.0, "nesterov": True, "momentum_form": "post"},
    "not adapted": {"adapt": False, "lr": 1e-3},
}
VARIANTS = {
    "-".join(map(str, form)): dict(
        zip(("momentum_form", "norm_of", "nesterov"), form, strict=True), weight_decay=1e-2
    )
    for form in FORMS
} | OTHERS


def expected(options, dtype=torch.float64, rates=()):
    params = parameters(dtype)
    reference = LarsReference([param.detach().clone() for param in params], **options)
    for index, grads in enumerate(gradients(params)):
        reference.lr = rates[index] if rates else reference.lr
        reference.step(grads)
    return reference.weights


@pytest.mark.sampled
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("options", VARIANTS.values(), ids=VARIANTS)
def test_follows_the_papers_formula(options, dtype):
    params = parameters(dtype)
    weights = run(TorchLars(params, **options), params)
    assert worst_difference(weights, expected(options, dtype)) < TOLERANCE[dtype]


@pytest.mark.parametrize("name", ["classic-sum-False", "classic-parts-True", "post-sum-False", *OTHERS])
def test_every_variant_ends_elsewhere_than_the_paper(name):
    paper = {**VARIANTS["classic-parts-False"]} if name in VARIANTS and name not in OTHERS else {}
    assert worst_difference(expected(VARIANTS[name]), expected(paper)) > 1e-7


@pytest.mark.slow
def test_learning_rate_inside_or_outside_the_velocity_differs_only_while_it_moves():
    moving = [0.1 + 0.02 * step for step in range(50)]
    forms = [{"momentum_form": form} for form in ("classic", "torch")]
    assert worst_difference(*[expected(form) for form in forms]) < 1e-12
    assert worst_difference(*[expected(form, rates=moving) for form in forms]) > 1e-4
    for form in forms:
        params = parameters(torch.float64)
        optimizer = TorchLars(params, **form)
        for lr, grads in zip(moving, gradients(params), strict=True):
            optimizer.param_groups[0]["lr"] = lr
            step(optimizer, params, grads)
        assert worst_difference([p.detach() for p in params], expected(form, rates=moving)) < 1e-12


@pytest.mark.parametrize("foreach", [False, True])
@pytest.mark.parametrize("nesterov", [False, True])
def test_agrees_with_pytorch_optimizer_set_to_the_same_variant(nesterov, foreach):
    ours, theirs = parameters(torch.float32), parameters(torch.float32)
    options = {"lr": 0.05, "momentum": 0.9, "weight_decay": 1e-2, "nesterov": nesterov}
    groups = [
        {"params": [p for p in ours if p.ndim > 1]},
        {"params": [p for p in ours if p.ndim <= 1], "adapt": False, "weight_decay": 0.0},
    ]
    weights = run(TorchLars(groups, momentum_form="torch", norm_of="parts", **options), ours)
    others = run(pytorch_optimizer.LARS(theirs, foreach=foreach, **options), theirs)
    assert worst_difference(weights, others) < 1e-6


def test_a_run_resumed_from_its_state_is_bit_exact():
    params = parameters(torch.float32)
    batches = list(gradients(params, 12))
    optimizer = TorchLars(params)
    for grads in batches[:6]:
        step(optimizer, params, grads)
    saved = copy.deepcopy((optimizer.state_dict(), [param.detach() for param in params]))
    for grads in batches[6:]:
        step(optimizer, params, grads)
    resumed = [nn.Parameter(tensor) for tensor in saved[1]]
    successor = TorchLars(resumed, lr=9.0)
    successor.load_state_dict(saved[0])
    for grads in batches[6:]:
        step(successor, resumed, grads)
    assert all(torch.equal(a, b) for a, b in zip(params, resumed, strict=True))


@pytest.mark.parametrize(
    "options",
    [{"lr": -1.0}, {"momentum": 1.0}, {"momentum_form": "heavy"}, {"norm_of": "all"}, {"eps": -1.0}],
)
def test_settings_out_of_range_are_named(options):
    (name, value), *_ = options.items()
    with pytest.raises(SpecError) as caught:
        TorchLars(parameters(torch.float32), **options)
    assert f"{name}={value!r}" in str(caught.value)
