"""Lazy modules: made before training, with the same values everywhere."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import shardscope as ss
from conformance.ranks import RankPool
from conformance.users import Case, follow, plain
from shardscope.errors import SpecError
from shardscope.training.lazy import is_unfinished, materialise


def rows() -> tuple[Tensor, Tensor]:
    x = torch.randn(60, 1, 6, 6, generator=torch.Generator().manual_seed(1))
    return x, x[:, 0, 0, 0].long().abs() % 3


def lazy() -> nn.Module:
    return nn.Sequential(
        nn.LazyConv2d(4, 3), nn.GroupNorm(2, 4), nn.Dropout(0.0), nn.Sequential(nn.ReLU(), nn.Flatten()),
        nn.LazyLinear(8), nn.Tanh(), nn.LazyLinear(8), nn.Tanh(), nn.Linear(8, 3),
    )  # fmt: skip


def made() -> nn.Module:
    """The same model as a user makes it by hand."""
    model = lazy()
    model(rows()[0][:2])
    return model


CASE = Case(lazy, rows)


@pytest.mark.parametrize(
    "strategy", ["ring", "parameter-server", "zero-1", "zero-3", ss.Pipeline(split="even")]
)
def test_lazy_layers_train_as_in_a_plain_loop(pool: RankPool, tmp_path: Path, strategy: str) -> None:
    recompute = "full" if strategy == "ring" else "none"
    expected = plain(Case(made, rows), functional.cross_entropy)
    follow(pool, tmp_path, CASE, strategy, expected, recompute=recompute)


def test_running_statistics_stay_as_they_begin() -> None:
    model = nn.Sequential(nn.Flatten(), nn.LazyBatchNorm1d(), nn.LazyLinear(3))
    materialise(model, rows()[0][:1])
    assert (model.training, is_unfinished(model)) == (True, False)
    assert (model[1].running_mean.tolist(), int(model[1].num_batches_tracked)) == ([0.0] * 36, 0)


def test_a_lazy_layer_that_no_input_reaches_is_named() -> None:
    model = nn.Sequential(nn.Flatten())
    model.aside = nn.ModuleList([nn.LazyLinear(2)])
    model.forward = lambda x: x  # type: ignore[method-assign]
    with pytest.raises(
        SpecError, match=r"'aside.0.weight' is lazy, .* did not initialise it; give all sizes"
    ):
        materialise(model, torch.ones(2, 2))


def test_inputs_in_double_precision_make_the_same_layers() -> None:
    x = rows()[0][:2]
    torch.manual_seed(0)
    expected = lazy()
    expected(x)
    torch.manual_seed(0)
    model = lazy()
    materialise(model, x.double())
    for a, b in zip(expected.parameters(), model.parameters(), strict=True):
        assert torch.equal(a, b)
