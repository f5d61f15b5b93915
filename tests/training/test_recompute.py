"""Recomputation changes what is stored and nothing else."""

from __future__ import annotations

import copy
from itertools import pairwise

import pytest
import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from conformance.computable import skip_unless_computable
from shardscope.errors import SpecError
from shardscope.spec.models import MODELS
from shardscope.training.loss import cross_entropy
from shardscope.training.models import blocks, build_model
from shardscope.training.recompute import apply_recompute
from training.memory.test_predicted_peak import measured_peak


def user_model():
    return nn.Sequential(nn.Linear(64, 32), nn.LayerNorm(32), nn.Dropout(0.5), nn.Linear(32, 10))


def make(name):
    torch.manual_seed(0)
    return (user_model() if name == "user" else build_model(name)).double()


def rows(name):
    generator = torch.Generator().manual_seed(1)
    if name == "gpt-nano":
        tokens = torch.randint(256, (4, 65), generator=generator)
        return tokens[:, :-1], tokens[:, 1:]
    images = torch.rand(8, 1, 8, 8, generator=generator, dtype=torch.float64)
    return images.flatten(1) if name == "user" else images, torch.arange(8)


def gradients(model, name):
    torch.manual_seed(2)  # the user's model has dropout
    x, y = rows(name)
    cross_entropy(model(x), y).backward()
    return {key: parameter.grad for key, parameter in model.named_parameters()}


def stored_bytes(model, name):
    """Bytes of activations that autograd holds after the forward pass, each storage once."""
    parameters = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    storages = {}

    def pack(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in parameters:
            storages[storage.data_ptr()] = storage  # held, so that no address is used twice
        return tensor

    with saved_tensors_hooks(pack, lambda tensor: tensor):
        model(rows(name)[0])
    return sum(storage.nbytes() for storage in storages.values())


class LiveResults(TorchDispatchMode):
    """Watches the memory behind every result, wherever it is kept."""

    def __init__(self):
        super().__init__()
        self.storages = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        results = func(*args, **(kwargs or {}))
        for result in tree_leaves(results):
            if isinstance(result, torch.Tensor):
                storage = result.untyped_storage()
                self.storages[storage._cdata] = storage._weak_ref(), storage.nbytes()
        return results

    def num_bytes(self, *, without):
        expired, known = (
            torch.UntypedStorage._expired,
            {tensor.untyped_storage()._cdata for tensor in without},
        )
        return sum(
            num_bytes
            for key, (reference, num_bytes) in self.storages.items()
            if key not in known and not expired(reference)
        )


def live_bytes(model, name):
    """Bytes in use after the forward pass, in autograd and anywhere else."""
    with LiveResults() as results:
        scores = model(rows(name)[0])
    assert scores.requires_grad
    return results.num_bytes(without=model.parameters())


class CountProducts(TorchDispatchMode):
    """Counts the matrix products and convolutions that run."""

    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        names = ("mm", "addmm", "convolution")
        self.count += func.overloadpacket.__name__ in names
        return func(*args, **(kwargs or {}))


def num_products(model, name):
    """Products in a forward and a backward pass."""
    with CountProducts() as counter:
        cross_entropy(model(rows(name)[0]), rows(name)[1]).backward()
    return counter.count


@pytest.mark.parametrize("mode", ["selective", "full"])
@pytest.mark.parametrize("name", ["mlp", "cnn", "resnet", "gpt-nano", "user"])
def test_gradients_are_those_of_the_plain_model(name, mode):
    plain, recomputed = make(name), apply_recompute(make(name), mode)
    expected, got = gradients(plain, name), gradients(recomputed, name)
    assert expected.keys() == got.keys()
    for key, gradient in expected.items():
        torch.testing.assert_close(got[key], gradient, rtol=1e-12, atol=1e-15)


@pytest.mark.parametrize("mode", ["none", "selective", "full"])
def test_parameters_keep_their_names(mode):
    assert apply_recompute(make("gpt-nano"), mode).state_dict().keys() == make("gpt-nano").state_dict().keys()


def test_a_gpt_stores_less_the_more_it_recomputes():
    none, selective, full = (
        stored_bytes(apply_recompute(make("gpt-nano"), mode), "gpt-nano")
        for mode in ("none", "selective", "full")
    )
    config = MODELS["gpt-nano"]
    unit = 4 * 64 * config.hidden * config.layers * 8  # one float64 for each layer, token and hidden unit
    assert none - selective == pytest.approx(5 * unit, rel=0.02)
    assert none - full == pytest.approx(15 * unit, rel=0.02)


@pytest.mark.slow
def test_the_first_blocks_recompute_when_the_activations_of_the_others_are_free():
    """So they add no buffer to the peak, as the memory formulas of `Layout.recompute_layers` assume."""

    def with_first(count):
        model = make("gpt-nano")
        apply_recompute(nn.Sequential(*blocks(model)[:count]), "full" if count else "none")
        return model

    layers = MODELS["gpt-nano"].layers
    stored = [stored_bytes(with_first(count), "gpt-nano") for count in (0, layers)]
    peaks = [measured_peak(with_first(count), rows("gpt-nano"), "sgd") for count in range(layers + 1)]
    freed = [before - after for before, after in pairwise(peaks)]
    assert freed[:-1] == pytest.approx([(stored[0] - stored[1]) / layers] * (layers - 1), rel=0.01)
    assert 0 <= freed[-1] < 0.9 * freed[0]


def test_selective_runs_no_product_of_a_gpt_twice():
    plain = num_products(make("gpt-nano"), "gpt-nano")
    assert num_products(apply_recompute(make("gpt-nano"), "selective"), "gpt-nano") == plain
    assert num_products(apply_recompute(make("gpt-nano"), "full"), "gpt-nano") > plain


@pytest.mark.parametrize("name", ["cnn", "resnet", "mlp"])
def test_selective_runs_no_product_of_an_image_model_twice(name):
    plain = num_products(make(name), name)
    assert num_products(apply_recompute(make(name), "selective"), name) == plain


@pytest.mark.parametrize("name", ["mlp", "cnn", "resnet", "gpt-nano"])
def test_less_memory_is_in_use_the_more_is_recomputed(name):
    none, selective, full = (
        live_bytes(apply_recompute(make(name), mode), name) for mode in ("none", "selective", "full")
    )
    assert full < 0.9 * selective < 0.9 * 0.9 * none


def test_evaluation_runs_each_block_once():
    model = apply_recompute(make("mlp"), "full")
    with torch.no_grad():
        torch.testing.assert_close(model(rows("mlp")[0]), make("mlp")(rows("mlp")[0]))


def test_a_copy_computes_with_its_own_weights():
    model = apply_recompute(make("mlp"), "full")
    twin = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in twin.parameters():
            parameter.zero_()
    assert not twin(rows("mlp")[0]).any()
    assert model(rows("mlp")[0]).any()


def test_applying_it_twice_changes_nothing_more():
    once = apply_recompute(make("gpt-nano"), "full")
    products = num_products(once, "gpt-nano")
    assert num_products(apply_recompute(once, "full"), "gpt-nano") == products


def test_an_unknown_mode_is_refused():
    with pytest.raises(SpecError, match="recompute='ful' is not known; did you mean 'full'"):
        apply_recompute(make("mlp"), "ful")


class Lstm(nn.Module):
    """Torch's own loop changes the products of its gates in place."""

    def __init__(self):
        super().__init__()
        self.cells = nn.LSTM(4, 5, batch_first=True)
        self.head = nn.Linear(5, 2)

    def forward(self, x):
        return self.head(self.cells(x.unflatten(1, (2, 4)))[0][:, -1])


class ChangesItsBlocks(nn.Module):
    """Changes what a block has returned in place."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Tanh(), nn.Linear(8, 8)) for _ in range(2))

    def forward(self, x):
        for block in self.blocks:
            y = block(x)
            y += x
            x = y
        return x


def changes_inside():
    return nn.Sequential(
        *(nn.Sequential(nn.Linear(8, 8), nn.ReLU(inplace=True), nn.LayerNorm(8)) for _ in range(2))
    )


def uses_a_block_twice():
    block = nn.Sequential(nn.Linear(8, 8), nn.Tanh())
    return nn.Sequential(block, nn.LayerNorm(8), block)


@pytest.mark.parametrize("precision", [torch.float64, torch.bfloat16])
@pytest.mark.parametrize("mode", ["selective", "full"])
@pytest.mark.parametrize("make_model", [Lstm, ChangesItsBlocks, changes_inside, uses_a_block_twice])
def test_recomputes_models_that_change_results_in_place_or_run_a_block_twice(make_model, mode, precision):
    torch.manual_seed(0)
    mixed = precision == torch.bfloat16
    plain = make_model().to(torch.float32 if mixed else precision)
    if mixed:
        skip_unless_computable(plain, precision)
    recomputed = apply_recompute(copy.deepcopy(plain), mode)
    x = torch.randn(3, 8, generator=torch.Generator().manual_seed(1)).to(next(plain.parameters()).dtype)
    for model in (plain, recomputed):
        with torch.autocast("cpu", torch.bfloat16, enabled=mixed):
            score = model(x).square().sum()
        score.backward()
    for expected, got in zip(plain.parameters(), recomputed.parameters(), strict=True):
        torch.testing.assert_close(got.grad, expected.grad, rtol=0, atol=0)


def test_a_backward_pass_that_comes_back_takes_no_result_for_another():
    plain = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))
    recomputed = apply_recompute(nn.Sequential(copy.deepcopy(plain)), "selective")
    x = torch.randn(3, 8)
    for model in (plain, recomputed):
        score = model(x).square().sum()
        score.backward(retain_graph=True)
        score.backward()
    for expected, got in zip(plain.parameters(), recomputed.parameters(), strict=True):
        torch.testing.assert_close(got.grad, expected.grad)
