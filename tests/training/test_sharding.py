"""The global norm and the clip where squares leave the format's range, held against exact arithmetic."""

from __future__ import annotations

import math
from concurrent.futures import ThreadPoolExecutor
from fractions import Fraction

import pytest
import torch
from torch import Tensor, nn

from shardscope.methods.optimizers.lamb._torch import TorchLamb
from shardscope.methods.optimizers.lars._torch import TorchLars
from shardscope.training.sharding import clip_grad_norm_
from training.optim.test_sharding import ThreadedSum

SIZES = {torch.float32: [1e-3, 1.0, 1e18, 1e25, 1e37, 3e38], torch.float64: [1.0, 1e25, 1e153, 1e200, 1e307]}
CASES = [(dtype, size) for dtype, sizes in SIZES.items() for size in sizes]


def gradients(dtype: torch.dtype, size: float) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    shapes = [(5, 3), (0, 3), (7,), ()]
    return [(torch.rand(s, generator=generator, dtype=torch.float64) * size).to(dtype) for s in shapes]


def exact_norm(grads: list[Tensor]) -> float:
    square = sum(Fraction(value) ** 2 for grad in grads for value in grad.flatten().tolist())
    return (
        float(math.isqrt(int(square * 10**40))) / 1e20 if square < 10**200 else float(math.isqrt(int(square)))
    )


def with_gradients(grads: list[Tensor]) -> list[nn.Parameter]:
    parameters = [nn.Parameter(torch.zeros_like(grad)) for grad in grads]
    for parameter, grad in zip(parameters, grads, strict=True):
        parameter.grad = grad.clone()
    return parameters


@pytest.mark.parametrize(("dtype", "size"), CASES)
def test_gradients_of_any_finite_size_are_clipped_as_exact_arithmetic_would(
    dtype: torch.dtype, size: float
) -> None:
    grads = gradients(dtype, size)
    parameters, exact = with_gradients(grads), exact_norm(grads)
    norm = clip_grad_norm_(parameters, 0.5)
    assert float(norm) == pytest.approx(exact, rel=1e-6)
    for parameter, grad in zip(parameters, grads, strict=True):
        assert parameter.grad is not None
        expected = (grad.double() / max(exact, 0.5) * 0.5).to(dtype)
        assert torch.allclose(parameter.grad, expected, rtol=1e-5, atol=1e-9)


@pytest.mark.parametrize(("dtype", "size"), [(torch.float32, 1e25), (torch.float64, 1e200)])
def test_shards_are_clipped_by_the_norm_of_the_whole(dtype: torch.dtype, size: float) -> None:
    grads, reduce = gradients(dtype, size), ThreadedSum(2)

    def clip(mine: list[Tensor]) -> tuple[float, list[nn.Parameter]]:
        parameters = with_gradients(mine)
        return float(clip_grad_norm_(parameters, 0.5, reduce_square=reduce)), parameters

    with ThreadPoolExecutor(2) as pool:
        ranks = list(pool.map(clip, (grads[:2], grads[2:])))
    assert [norm for norm, _ in ranks] == pytest.approx([exact_norm(grads)] * 2, rel=1e-6)
    clipped = [p.grad for _, parameters in ranks for p in parameters if p.grad is not None]
    assert exact_norm(clipped) == pytest.approx(0.5, rel=1e-6)


@pytest.mark.parametrize("bad", [math.inf, math.nan])
def test_gradients_that_are_not_finite_have_no_finite_norm(bad: float) -> None:
    parameters = with_gradients([torch.tensor([1.0, bad]), torch.ones(2)])
    assert not math.isfinite(clip_grad_norm_(parameters, 0.5))


@pytest.mark.parametrize("size", [1.0, 1e25])
def test_lamb_brings_huge_gradients_to_its_max_grad_norm(size: float) -> None:
    (small, large) = (with_gradients(gradients(torch.float32, scale)) for scale in (1.0, size))
    for parameters in (small, large):
        TorchLamb([p for p in parameters if p.numel()], max_grad_norm=1e-3, lr=0.1).step()
    for expected, found in zip(small, large, strict=True):
        assert torch.allclose(expected, found, rtol=1e-4)
        assert found.isfinite().all()


@pytest.mark.parametrize("norm_of", ["sum", "parts"])
def test_lars_moves_by_huge_gradients_as_far_as_by_small_ones(norm_of: str) -> None:
    moved = []
    for size in (1e3, 1e25):
        weight = nn.Parameter(torch.ones(4, 4))
        weight.grad = torch.full_like(weight, size)
        TorchLars([weight], weight_decay=0.0, momentum=0.0, norm_of=norm_of).step()
        moved.append(float((1 - weight.detach())[0, 0]))
    assert moved[0] == pytest.approx(1e-3, rel=1e-3)
    assert moved[1] == pytest.approx(moved[0], rel=1e-3)
