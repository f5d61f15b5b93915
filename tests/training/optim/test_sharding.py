"""LAMB and LARS on shards: the same step as unsharded, for one reduction of one vector."""

from __future__ import annotations

import importlib.util
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import nn

from shardscope.methods.optimizers.lamb._torch import TorchLamb
from shardscope.methods.optimizers.lars._torch import TorchLars
from training.optim.problems import gradients, parameters, run, worst_difference

SHAPES = ((7,), (3, 5), (40, 13), (1,))
OPTIMIZERS = {
    "lamb": TorchLamb,
    "lars": TorchLars,
    "lars post": lambda params, **hooks: TorchLars(params, momentum_form="post", nesterov=True, **hooks),
    "lamb clipped": lambda params, **hooks: TorchLamb(params, max_grad_norm=0.5, **hooks),
}
needs_numba = pytest.mark.skipif(importlib.util.find_spec("numba") is None, reason="numba is not installed")


class ThreadedSum:
    """An all-reduce between threads, one a rank, that counts its calls."""

    def __init__(self, world_size):
        self.calls = 0
        self._parts = []
        self._lock = threading.Lock()
        self._barrier = threading.Barrier(world_size, timeout=120)

    def __call__(self, squares):
        with self._lock:
            self.calls += 1
            self._parts.append(squares)
        self._barrier.wait()
        total = torch.stack(self._parts).sum(dim=0)
        if self._barrier.wait() == 0:
            self._parts.clear()
        self._barrier.wait()
        return total


def shard(tensor, rank, world_size):
    return tensor.detach().reshape(-1).tensor_split(world_size)[rank].clone()


def run_on_shards(make, world_size, steps, dtype=torch.float64):
    full = parameters(dtype, SHAPES)
    reduce = ThreadedSum(world_size)

    def rank_main(rank):
        params = [nn.Parameter(shard(param, rank, world_size)) for param in full]
        optimizer = make(params, reduce_squares=reduce)
        for grads in gradients(full, steps):
            for param, grad in zip(params, grads, strict=True):
                param.grad = shard(grad, rank, world_size)
            optimizer.step()
        return params, optimizer.trust_ratios()

    with ThreadPoolExecutor(world_size) as pool:
        ranks = list(pool.map(rank_main, range(world_size)))
    pieces = zip(*(params for params, _ in ranks), strict=True)
    return [torch.cat(piece).detach() for piece in pieces], [ratios for _, ratios in ranks], reduce.calls


@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_shards_move_as_the_whole_does(make, world_size):
    whole = parameters(torch.float64, SHAPES)
    unsharded = make(whole)
    expected = [tensor.reshape(-1) for tensor in run(unsharded, whole, 8)]
    weights, ratios, calls = run_on_shards(make, world_size, 8)
    assert worst_difference(weights, expected) < 1e-12
    assert all(each == pytest.approx(unsharded.trust_ratios(), rel=1e-12) for each in ratios)
    is_clipped = getattr(unsharded, "max_grad_norm", None) is not None
    assert calls == 8 * world_size * (2 if is_clipped else 1)


@needs_numba
@pytest.mark.parametrize("options", [{}, {"max_grad_norm": 0.5}], ids=str)
def test_compiled_shards_move_as_the_whole_does(options):
    def make(params, **hooks):
        return TorchLamb(params, form="compiled", **options, **hooks)

    whole = parameters(torch.float32, SHAPES)
    expected = [tensor.reshape(-1) for tensor in run(make(whole), whole, 8)]
    weights, ratios, calls = run_on_shards(make, 3, 8, torch.float32)
    assert worst_difference(weights, expected) < 1e-6
    assert ratios[0] == ratios[1] == ratios[2]
    assert calls == 8 * 3 * (1 + len(options))


def test_without_the_reduction_shards_go_wrong():
    whole = parameters(torch.float64, SHAPES)
    expected = run(TorchLamb(whole), whole, 8)[1].reshape(-1)
    halves = [nn.Parameter(shard(parameters(torch.float64, SHAPES)[1], rank, 2)) for rank in range(2)]
    optimizers = [TorchLamb([half]) for half in halves]
    for grads in gradients(whole, 8):
        for rank, (half, optimizer) in enumerate(zip(halves, optimizers, strict=True)):
            half.grad = shard(grads[1], rank, 2)
            optimizer.step()
    assert worst_difference([torch.cat(halves).detach()], [expected]) > 1e-4


def test_lamb_leaves_uncounted_gradients_out_of_its_global_norm():
    seen = []

    def reduce_square(square):
        seen.append(float(square))
        return square

    counted, copied = (torch.nn.Parameter(torch.ones(4, 2)) for _ in range(2))
    counted.grad, copied.grad = torch.full((4, 2), 2.0), torch.full((4, 2), 5.0)
    TorchLamb(
        [counted, copied], max_grad_norm=1.0, reduce_grad_square=reduce_square, duplicate_grad_params=[copied]
    ).step()
    assert seen == [8 * 4.0]


def test_lamb_joins_the_global_norm_without_a_gradient_of_its_own():
    seen = []
    weight = torch.nn.Parameter(torch.ones(4))
    TorchLamb(
        [weight], max_grad_norm=1.0, reduce_grad_square=lambda square: seen.append(float(square)) or square
    ).step()
    assert seen == [0.0]
