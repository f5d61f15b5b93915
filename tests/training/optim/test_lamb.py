from __future__ import annotations

import copy
import importlib.util

import pytest
import pytorch_optimizer
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from shardscope.errors import SpecError
from shardscope.methods.optimizers.lamb import _torch, _torch_loops
from shardscope.methods.optimizers.lamb._torch import TorchLamb
from shardscope.training import _compat
from shardscope.training.compression import route
from shardscope.training.optim import _layerwise
from training.optim.problems import gradients, parameters, run, step, worst_difference
from training.optim.reference import LambReference

VARIANTS = {
    "paper": {},
    "v3": {"bias_correction": False},
    "apex": {"max_grad_norm": 1.0},
    "apex undecayed": {"max_grad_norm": 1.0, "weight_decay": 0.0, "adapt": False},
    "timm decoupled": {"max_grad_norm": 1.0, "decay_form": "decoupled"},
    "LAMBC": {"trust_clip": True},
    "clamped": {"clamp": 0.5},
    "no averaging": {"grad_averaging": False},
    "no decay": {"weight_decay": 0.0},
    "pytorch-optimizer": {"bias_correction": False, "clamp": 10.0, "decay_form": "decoupled"},
}
needs_numba = pytest.mark.skipif(importlib.util.find_spec("numba") is None, reason="numba is not installed")
FORMS = ["auto", "plain", pytest.param("compiled", marks=needs_numba)]
TOLERANCE = {torch.float32: 1e-6, torch.float64: 1e-12}


@pytest.fixture(params=["whole", "cut"])
def cache(request, monkeypatch):
    """Once with every layer in one piece, once with the large one cut and the small ones in several batches."""
    if request.param == "cut":
        monkeypatch.setattr(_layerwise, "CACHE_ELEMENTS", 32)


def expected(options, dtype=torch.float64):
    """The reference after a whole run, in the same dtype: float32 weights round alike however they are computed."""
    params = parameters(dtype)
    reference = LambReference([param.detach().clone() for param in params], **options)
    for grads in gradients(params):
        reference.step(grads)
    return reference


@pytest.mark.sampled
@pytest.mark.usefixtures("cache")
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("options", VARIANTS.values(), ids=VARIANTS)
def test_follows_the_papers_formula(options, dtype, form):
    if form == "compiled" and dtype != torch.float32:
        pytest.skip("the compiled loop takes float32")
    params = parameters(dtype)
    weights = run(TorchLamb(params, form=form, **options), params)
    assert worst_difference(weights, expected(options, dtype).weights) < TOLERANCE[dtype]


@pytest.mark.parametrize("options", [options for name, options in VARIANTS.items() if name != "paper"])
def test_every_variant_ends_elsewhere_than_the_paper(options):
    assert worst_difference(expected(options).weights, expected({}).weights) > 1e-4


@settings(max_examples=25, deadline=None)
@given(
    shapes=st.lists(st.lists(st.integers(1, 6), max_size=4).map(tuple), min_size=3, max_size=6),
    lr=st.floats(1e-5, 1e-1),
    decay=st.floats(0, 0.5),
    seed=st.integers(0, 2**32),
)
def test_follows_the_formula_for_any_shapes(shapes, lr, decay, seed):
    params = parameters(torch.float64, shapes, seed)
    reference = LambReference([p.detach().clone() for p in params], lr=lr, weight_decay=decay)
    for grads in gradients(params, 3, seed):
        reference.step(grads)
    optimizer = TorchLamb(params, lr, weight_decay=decay)
    for grads in gradients(params, 3, seed):
        step(optimizer, params, grads)
    assert worst_difference([p.detach() for p in params], reference.weights) < 1e-12
    assert list(optimizer.trust_ratios().values()) == pytest.approx(reference.ratios, rel=1e-12)


@pytest.mark.parametrize("foreach", [False, True])
def test_agrees_with_pytorch_optimizer_set_to_the_same_variant(foreach):
    ours, theirs = parameters(torch.float64), parameters(torch.float64)  # it adds eps to |u|, far below 1e-6
    options = {"lr": 1e-3, "weight_decay": 0.01, "eps": 1e-6}
    variant = VARIANTS["pytorch-optimizer"] | options
    weights = run(TorchLamb(ours, **variant), ours)
    # without adam_debias it divides the learning rate by 1 - beta1**step, which no paper does
    others = run(pytorch_optimizer.Lamb(theirs, **options, adam_debias=True, foreach=foreach), theirs)
    assert worst_difference(weights, others) < 1e-6


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("options", [{}, {"bias_correction": False}, {"decay_form": "decoupled"}])
def test_fused_and_plain_agree(options, dtype):
    one, two = parameters(dtype), parameters(dtype)
    fused = run(TorchLamb(one, form="fused", **options), one)
    plain = run(TorchLamb(two, form="plain", **options), two)
    assert worst_difference(fused, plain) < TOLERANCE[dtype]


@needs_numba
@pytest.mark.parametrize("options", VARIANTS.values(), ids=VARIANTS)
def test_compiled_and_plain_agree_in_weights_and_ratios(options):
    one, two = parameters(torch.float32), parameters(torch.float32)
    optimizers = TorchLamb(one, form="compiled", **options), TorchLamb(two, form="plain", **options)
    compiled, plain = run(optimizers[0], one), run(optimizers[1], two)
    assert worst_difference(compiled, plain) < 1e-6
    assert optimizers[0].trust_ratios() == pytest.approx(optimizers[1].trust_ratios(), rel=1e-4)


@needs_numba
def test_compiled_gives_the_same_bits_on_any_number_of_threads(monkeypatch):
    monkeypatch.setattr(_torch_loops, "_BLOCKS_PER_THREAD", 2)
    results = []
    for threads in (1, 3):
        monkeypatch.setattr(route.torch, "get_num_threads", lambda threads=threads: threads)
        params = parameters(torch.float32)
        results.append(run(TorchLamb(params, form="compiled"), params, 5))
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


@needs_numba
def test_compiled_keeps_what_is_not_finite():
    weights = [[1.0, float("inf")], [1.0, 2.0], [1.0, 2.0]]
    grads = [[1.0, 1.0], [1.0, float("nan")], [1.0, float("inf")]]
    moved = {}
    for form in ("compiled", "plain"):
        params = [nn.Parameter(torch.tensor(values)) for values in weights]
        for param, values in zip(params, grads, strict=True):
            param.grad = torch.tensor(values)
        TorchLamb(params, form=form, weight_decay=0.0).step()
        moved[form] = [param.detach() for param in params]
    assert not any(values.isfinite().all() for values in moved["plain"])
    for one, other in zip(moved["compiled"], moved["plain"], strict=True):
        assert torch.equal(one, other) or torch.equal(one.isnan(), other.isnan())


@needs_numba
@pytest.mark.parametrize("implementation", ["numba", "torch"])
def test_auto_takes_the_compiled_loop_for_large_models_where_numba_is_wanted(implementation, monkeypatch):
    calls = []
    kernel = _compat.fused_adamw_
    monkeypatch.setattr(_compat, "fused_adamw_", lambda *a, **k: (calls.append(1), kernel(*a, **k)))
    monkeypatch.setattr(_torch, "COMPILED_ELEMENTS", 12_000)
    monkeypatch.setenv(route.VARIABLE, implementation)
    params = parameters(torch.float32)
    run(TorchLamb(params), params, steps=1)
    assert bool(calls) == (implementation == "torch")
    calls.clear()
    run(TorchLamb(params[:-2]), params[:-2], steps=1)
    assert calls, "few elements do not pay for loading numba"


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
def test_compiled_is_refused_where_it_does_not_apply(dtype, monkeypatch):
    monkeypatch.setenv(route.VARIABLE, "torch")
    params = parameters(dtype)
    with pytest.raises(
        SpecError, match=r"form='compiled' needs numba and contiguous float32.*use form='auto'"
    ):
        run(TorchLamb(params, form="compiled"), params, steps=1)


def test_auto_takes_the_fused_kernel_where_it_applies_and_only_there(monkeypatch):
    calls = []
    kernel = _compat.fused_adamw_
    monkeypatch.setattr(_compat, "fused_adamw_", lambda *a, **k: (calls.append(1), kernel(*a, **k)))
    params = parameters(torch.float32)
    run(TorchLamb(params), params, steps=1)
    assert calls
    calls.clear()
    run(TorchLamb(params, grad_averaging=False), params, steps=1)
    run(TorchLamb(params, form="plain"), params, steps=1)
    assert not calls


def test_fused_is_refused_where_it_does_not_apply(monkeypatch):
    params = parameters(torch.float32)
    with pytest.raises(SpecError, match=r"form='fused' needs contiguous.*use form='auto'"):
        run(TorchLamb(params, form="fused", grad_averaging=False), params, steps=1)
    monkeypatch.setattr(_compat, "HAS_FUSED_ADAMW", False)
    with pytest.raises(SpecError, match="form='fused'"):
        run(TorchLamb(params, form="fused"), params, steps=1)


def test_works_on_tensors_that_are_not_contiguous():
    weights = torch.randn(6, 5, dtype=torch.float64)
    image = torch.randn(2, 3, 4, 4, dtype=torch.float64).to(memory_format=torch.channels_last)
    column = torch.randn(6, 5, dtype=torch.float64)[:, 0]
    params = [nn.Parameter(weights.t()), nn.Parameter(image), nn.Parameter(column)]
    assert not any(param.is_contiguous() for param in params)
    reference = LambReference([param.detach().clone() for param in params])
    for grads in gradients(params, 5):
        reference.step(grads)
    assert worst_difference(run(TorchLamb(params), params, 5), reference.weights) < 1e-12


def test_a_late_gradient_starts_its_own_bias_correction():
    early, late = (nn.Parameter(torch.ones(3, dtype=torch.float64)) for _ in range(2))
    optimizer = TorchLamb([early, late])
    early.grad = torch.full_like(early, 0.3)
    for _ in range(5):
        optimizer.step()
    assert late.tolist() == [1.0] * 3
    late.grad = torch.full_like(late, 0.3)
    optimizer.step()
    reference = LambReference([torch.ones(3, dtype=torch.float64)])
    reference.step([late.grad])
    assert worst_difference([late.detach()], reference.weights) < 1e-12


def test_gradients_are_left_as_they_are():
    params = parameters(torch.float32)
    optimizer = TorchLamb(params, max_grad_norm=0.01)
    grads = next(gradients(params))
    step(optimizer, params, grads)
    assert all(torch.equal(param.grad, grad) for param, grad in zip(params, grads, strict=True))


def test_trust_ratios_carry_names_and_leave_out_what_is_not_adapted():
    params = parameters(torch.float64)
    groups = [
        {"params": [("a", params[3]), ("b", params[6])]},
        {"params": [("c", params[1])], "adapt": False},
    ]
    optimizer = TorchLamb(groups)
    assert optimizer.trust_ratios() == {}
    grads = next(gradients(params))
    step(optimizer, params, grads)
    reference = LambReference([parameters(torch.float64)[i].detach() for i in (3, 6)])
    reference.step([grads[3], grads[6]])
    assert optimizer.trust_ratios() == pytest.approx(dict(zip("ab", reference.ratios, strict=True)))


@pytest.mark.parametrize("form", FORMS)
def test_a_run_resumed_from_its_state_is_bit_exact(form):
    params = parameters(torch.float32)
    batches = list(gradients(params, 20))
    optimizer = TorchLamb(params, form=form)
    for grads in batches[:10]:
        step(optimizer, params, grads)
    saved = copy.deepcopy((optimizer.state_dict(), [param.detach() for param in params]))
    for grads in batches[10:]:
        step(optimizer, params, grads)
    resumed = [nn.Parameter(tensor) for tensor in saved[1]]
    successor = TorchLamb(resumed, lr=9.0, form=form)
    successor.load_state_dict(saved[0])
    for grads in batches[10:]:
        step(successor, resumed, grads)
    assert all(torch.equal(a, b) for a, b in zip(params, resumed, strict=True))


def test_a_copy_goes_on_by_itself():
    params = parameters(torch.float32)
    optimizer = TorchLamb(params, max_grad_norm=0.5)
    run(optimizer, params, 2)
    twin = copy.deepcopy(optimizer)
    twin_params = twin.param_groups[0]["params"]
    assert worst_difference(run(twin, twin_params, 3), run(optimizer, params, 3)) == 0
    assert twin.max_grad_norm == 0.5


@pytest.mark.parametrize(
    "options",
    [
        {"lr": -1.0},
        {"betas": (0.9, 1.0)},
        {"eps": float("nan")},
        {"weight_decay": -0.1},
        {"clamp": 0.0},
        {"max_grad_norm": -1.0},
        {"form": "fast"},
        {"decay_form": "outside"},
    ],
)
def test_settings_out_of_range_are_named(options):
    (name, value), *_ = options.items()
    with pytest.raises(SpecError) as caught:
        TorchLamb(parameters(torch.float32), **options)
    assert f"{name}={value!r}" in str(caught.value)


def test_complex_weights_are_refused_by_name():
    weight = nn.Parameter(torch.ones(3, dtype=torch.complex64))
    weight.grad = torch.ones_like(weight)
    with pytest.raises(SpecError, match=r"parameter 'weight' is complex.*use optimizer='sgd'"):
        TorchLamb([("weight", weight)]).step()


def test_a_closure_gives_the_loss_and_the_gradient():
    weights = nn.Parameter(torch.ones(3))
    optimizer = TorchLamb([weights], lr=0.1)

    def closure():
        optimizer.zero_grad()
        loss = (weights**2).sum()
        loss.backward()
        return loss

    assert optimizer.step(closure).item() == 3.0
    assert optimizer.step(closure).item() < 3.0
