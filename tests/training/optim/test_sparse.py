"""SGD where gradients come late or hold only some rows, held against torch's plain form; who refuses such gradients."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from conformance.optimizers import build_optimizer
from shardscope.errors import SpecError
from shardscope.spec.optimizer import Optimizer
from shardscope.training.optim.sparse import prepare_sparse_embeddings
from shardscope.training.sharding import clip_grad_norm_

SETTINGS: list[dict[str, Any]] = [
    {"name": name, "weight_decay": decay, **momentum}
    for (name, momentum), decay in itertools.product(
        [("sgd", {}), ("sgd", {"momentum": 0.9}), ("nesterov", {"momentum": 0.9})], [0.0, 0.1]
    )
]


def plain(net: nn.Module, settings: dict[str, Any]) -> torch.optim.Optimizer:
    known = {key: value for key, value in settings.items() if key != "name"}
    nesterov = settings["name"] == "nesterov"
    return torch.optim.SGD(net.parameters(), lr=0.1, nesterov=nesterov, fused=False, foreach=False, **known)


def ours(net: nn.Module, settings: dict[str, Any]) -> torch.optim.Optimizer:
    return build_optimizer(Optimizer(lr=0.1, **settings), net.named_parameters())


def late(step: int, net: Any) -> Tensor:
    """The first layer from the first step on, the second from the third, the third only in the fifth."""
    x = torch.ones(2, 4) * step
    used = [net[0], *([net[1]] if step >= 3 else []), *([net[2]] if step == 5 else [])]
    return sum((layer(x).square().mean() for layer in used), torch.zeros(()))


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_parameters_whose_first_gradient_comes_late_move_as_in_plain_torch(settings: dict[str, Any]) -> None:
    nets = []
    for make in (plain, ours):
        torch.manual_seed(0)
        net = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
        optimizer = make(net, settings)
        for step in range(1, 8):
            optimizer.zero_grad()
            late(step, net).backward()
            optimizer.step()
        nets.append(net)
    for expected, found in zip(*(net.parameters() for net in nets), strict=True):
        assert torch.allclose(expected, found, rtol=1e-6, atol=1e-7)


def looked_up(*, is_sparse: bool, settings: dict[str, Any], clip: float | None) -> tuple[Tensor, Tensor]:
    """A table and a head after a few steps in which rows come and go, some of them twice in a step."""
    torch.manual_seed(0)
    net = nn.ModuleList([nn.Embedding(12, 3, sparse=is_sparse), nn.Linear(3, 1)])
    optimizer = (ours if is_sparse else plain)(net, settings)
    for step in range(6):
        optimizer.zero_grad()
        net[1](net[0](torch.tensor([step, step, step + 1, 11]))).square().mean().backward()
        if clip is not None:
            clip_grad_norm_(list(net.parameters()), clip)
        optimizer.step()
    return net[0].weight.detach(), net[1].weight.detach()


@pytest.mark.parametrize("clip", [None, 1e-2])
@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_sparse_gradients_move_a_table_as_dense_ones_do(settings: dict[str, Any], clip: float | None) -> None:
    expected = looked_up(is_sparse=False, settings=settings, clip=clip)
    found = looked_up(is_sparse=True, settings=settings, clip=clip)
    assert all(torch.allclose(a, b, rtol=1e-5, atol=1e-7) for a, b in zip(expected, found, strict=True))


def test_bare_sgd_leaves_a_sparse_gradient_sparse() -> None:
    table = nn.Embedding(12, 3, sparse=True)
    optimizer = ours(table, SETTINGS[0])
    table(torch.tensor([1])).sum().backward()
    optimizer.step()
    assert table.weight.grad is not None
    assert table.weight.grad.is_sparse


@pytest.mark.parametrize("name", ["adamw", "lamb", "lars"])
def test_other_optimizers_refuse_sparse_gradients_with_advice_that_works(name: str) -> None:
    for advised in ({"optimizer": name, "is_sparse": False}, {"optimizer": "sgd", "is_sparse": True}, None):
        table = nn.Embedding(12, 3, sparse=advised is None or bool(advised["is_sparse"]))
        spec = Optimizer(name if advised is None else str(advised["optimizer"]))
        optimizer = build_optimizer(spec, table.named_parameters())
        nn.functional.embedding(torch.tensor([1]), table.weight, sparse=table.sparse).sum().backward()
        if advised is not None:
            prepare_sparse_embeddings(table, optimizer=spec, world_size=1)
            optimizer.step()
            continue
        words = f"has a sparse gradient, which optimizer='{name}' does not support; .*sparse=False.*'sgd'"
        with pytest.raises(SpecError, match=words):
            prepare_sparse_embeddings(table, optimizer=Optimizer(name), world_size=2)
        with pytest.raises(SpecError, match=words):
            optimizer.step()


def test_ranks_that_exchange_gradients_have_dense_ones() -> None:
    net = nn.Sequential(nn.Embedding(4, 2, sparse=True), nn.EmbeddingBag(4, 2, sparse=True))
    prepare_sparse_embeddings(net, optimizer=Optimizer("sgd"), world_size=2)
    assert [module.sparse for module in net] == [False, False]


def test_a_frozen_table_is_left_as_it_is_under_every_optimizer() -> None:
    table = nn.Embedding(4, 2, sparse=True)
    table.weight.requires_grad_(False)
    prepare_sparse_embeddings(
        nn.Sequential(table, nn.Linear(2, 2)), optimizer=Optimizer("adamw"), world_size=1
    )
    assert table.sparse
