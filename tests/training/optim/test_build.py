from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict

from conformance.optimizers import build_optimizer
from shardscope.methods.optimizers.lamb import VARIANTS
from shardscope.methods.optimizers.lamb._torch import TorchLamb
from shardscope.methods.optimizers.lars._torch import TorchLars
from shardscope.spec.optimizer import Optimizer
from shardscope.spec.registry import names

FORMS = {
    "sgd": torch.optim.SGD,
    "nesterov": torch.optim.SGD,
    "adamw": torch.optim.AdamW,
    "lamb": TorchLamb,
    "lars": TorchLars,
}


def model(dtype=torch.float32):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.LayerNorm(8), nn.Linear(8, 3)).to(dtype)


def train(net, optimizer, steps=5, seed=1):
    generator = torch.Generator().manual_seed(seed)
    dtype = next(net.parameters()).dtype
    for _ in range(steps):
        optimizer.zero_grad()
        net(torch.randn(16, 6, generator=generator, dtype=torch.float64).to(dtype)).square().mean().backward()
        optimizer.step()
    return [param.detach().clone() for param in net.parameters()]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("name", names(Optimizer))
def test_builds_every_optimizer_and_it_trains(name, dtype):
    net = model(dtype)
    before = [param.detach().clone() for param in net.parameters()]
    optimizer = build_optimizer(Optimizer(name), net.named_parameters())
    assert type(optimizer) is FORMS[name]
    after = train(net, optimizer)
    assert all(not torch.equal(a, b) and b.isfinite().all() for a, b in zip(before, after, strict=True))


@pytest.mark.parametrize("name", ["sgd", "nesterov", "adamw"])
def test_torchs_own_take_the_settings_and_their_fused_form(name):
    spec = Optimizer(name, lr=0.03, weight_decay=0.07)
    group = build_optimizer(spec, model().named_parameters()).param_groups[0]
    assert (group["lr"], group["weight_decay"], group["fused"]) == (0.03, 0.07, True)
    assert group.get("nesterov", False) == (name == "nesterov")


@pytest.mark.parametrize("variant", VARIANTS)
def test_lamb_takes_what_its_variant_says(variant):
    spec = Optimizer("lamb", variant=variant)
    optimizer = build_optimizer(spec, model().named_parameters())
    group = optimizer.param_groups[0]
    for name in ("lr", "betas", "eps", "weight_decay", "bias_correction", "decay_form", "trust_clip"):
        assert group[name] == spec.settings[name]
    bounds = {"clamp": group["clamp"], "max_grad_norm": optimizer.max_grad_norm}
    assert bounds == {
        name: None if spec.settings[name] == "off" else spec.settings[name]
        for name in ("clamp", "max_grad_norm")
    }


def test_apexs_lamb_adapts_only_decayed_tensors_and_nvlamb_all():
    adapts = {
        variant: build_optimizer(
            Optimizer("lamb", variant=variant, weight_decay=0), model().named_parameters()
        ).param_groups[0]["adapt"]
        for variant in ("apex", "nvlamb")
    }
    assert adapts == {"apex": False, "nvlamb": True}


@pytest.mark.parametrize("name", names(Optimizer))
def test_excluded_biases_and_norms_are_neither_decayed_nor_adapted(name):
    net = model()
    optimizer = build_optimizer(Optimizer(name, weight_decay=0.1, exclude="1d"), net.named_parameters())
    kept, excluded = optimizer.param_groups
    assert kept["param_names"] == ["0.weight", "2.weight"]
    assert excluded["param_names"] == ["0.bias", "1.weight", "1.bias", "2.bias"]
    assert (kept["weight_decay"], excluded["weight_decay"]) == (0.1, 0.0)
    train(net, optimizer)
    if name in {"lamb", "lars"}:
        assert set(optimizer.trust_ratios()) == {"0.weight", "2.weight"}


def test_frozen_parameters_are_left_out():
    net = model()
    net[0].requires_grad_(False)
    optimizer = build_optimizer(Optimizer("lamb"), net.named_parameters())
    assert "0.weight" not in optimizer.param_groups[0]["param_names"]


@pytest.mark.parametrize("exclude", ["none", "1d"])
@pytest.mark.parametrize("name", ["lamb", "lars"])
def test_state_goes_through_torchs_distributed_checkpoint_form(name, exclude):
    spec = Optimizer(name, exclude=exclude)
    net = model()
    optimizer = build_optimizer(spec, net.named_parameters())
    train(net, optimizer)
    saved = copy.deepcopy(get_optimizer_state_dict(net, optimizer))
    resumed = copy.deepcopy(net)
    successor = build_optimizer(spec, resumed.named_parameters())
    set_optimizer_state_dict(resumed, successor, saved)
    expected = train(net, optimizer, seed=2)
    assert all(torch.equal(a, b) for a, b in zip(train(resumed, successor, seed=2), expected, strict=True))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("name", names(Optimizer))
def test_the_gpu_ends_where_the_cpu_does_without_waiting(name):
    host, device = model(torch.float64), model(torch.float64).cuda()
    on_host = build_optimizer(Optimizer(name), host.named_parameters())
    on_device = build_optimizer(Optimizer(name), device.named_parameters())
    for ours, theirs in zip(host.parameters(), device.parameters(), strict=True):
        ours.grad = torch.ones_like(ours)
        theirs.grad = torch.ones_like(theirs)
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(3):
            on_host.step()
            on_device.step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    for ours, theirs in zip(host.parameters(), device.parameters(), strict=True):
        assert torch.allclose(ours, theirs.cpu(), rtol=1e-12, atol=1e-14)
