"""FLOPs of matrix operations, beside counts from their definitions; those without a formula are named."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import shardscope as ss
from shardscope.spec.model import Model
from shardscope.training.describe import describe
from shardscope.training.flops import flop_counter


def counted(
    function: Callable[..., Any], *shapes: tuple[int, ...], dtype: torch.dtype = torch.float32
) -> int:
    with flop_counter() as counter:
        function(*(torch.randn(shape, dtype=dtype, requires_grad=True) for shape in shapes))
    assert not counter.uncounted
    return counter.get_total_flops()


def gates(count: int, width: int, hidden: int, *, out: int | None = None) -> int:
    """Multiply-adds of one recurrent layer for one step of one sequence, in one direction."""
    state = hidden if out is None else out
    return count * hidden * (width + state) + (0 if out is None else hidden * out)


PRODUCTS: dict[str, tuple[Callable[..., Any], list[tuple[int, ...]], int]] = {
    "matrix @ vector": (lambda w, x: w @ x, [(40, 50), (50,)], 40 * 50),
    "vector @ matrix": (lambda w, x: x @ w, [(50, 40), (50,)], 50 * 40),
    "batch @ vector": (lambda w, x: w @ x, [(3, 40, 50), (50,)], 3 * 40 * 50),
    "dot": (lambda a, b: a @ b, [(50,), (50,)], 50),
    "vdot": (torch.vdot, [(50,), (50,)], 50),
    "inner": (torch.inner, [(40, 50), (30, 50)], 40 * 30 * 50),
    "addmv": (torch.addmv, [(40,), (40, 50), (50,)], 40 * 50),
    "addbmm": (torch.addbmm, [(3, 4), (2, 3, 5), (2, 5, 4)], 2 * 3 * 4 * 5),
    "baddbmm": (torch.baddbmm, [(2, 3, 4), (2, 3, 5), (2, 5, 4)], 2 * 3 * 4 * 5),
    "einsum to a matrix": (lambda a, b: torch.einsum("bi,ij->bj", a, b), [(4, 5), (5, 6)], 4 * 5 * 6),
    "einsum to a vector": (lambda a, b: torch.einsum("i,ij->j", a, b), [(5,), (5, 6)], 5 * 6),
    "einsum of rows": (lambda a, b: torch.einsum("bi,bi->b", a, b), [(4, 5), (4, 5)], 4 * 5),
    "tensordot": (lambda a, b: torch.tensordot(a, b, 2), [(4, 5, 6), (5, 6, 7)], 4 * 5 * 6 * 7),
    "matrix power": (lambda a: torch.linalg.matrix_power(a, 3), [(6, 6)], 2 * 6**3),
    "distances": (torch.cdist, [(40, 8), (60, 8)], 40 * 60 * 8),
    "linear": (functional.linear, [(2, 3, 5), (4, 5), (4,)], 2 * 3 * 5 * 4),
    "linear of a vector": (functional.linear, [(5,), (4, 5)], 5 * 4),
    "outer": (torch.outer, [(4,), (5,)], 0),
    "attention": (functional.scaled_dot_product_attention, [(2, 4, 8, 16)] * 3, 2 * 2 * 4 * 8 * 8 * 16),
    "attention of other width": (
        functional.scaled_dot_product_attention,
        [(2, 4, 8, 16), (2, 4, 6, 16), (2, 4, 6, 24)],
        2 * 4 * 8 * 6 * (16 + 24),
    ),
    "attention of groups": (
        lambda q, k, v: functional.scaled_dot_product_attention(q, k, v, enable_gqa=True),
        [(2, 4, 8, 16), (2, 2, 8, 16), (2, 2, 8, 16)],
        2 * 2 * 4 * 8 * 8 * 16,
    ),
    "bilinear": (functional.bilinear, [(7, 5), (7, 6), (3, 5, 6)], 7 * 3 * (5 * 6 + 6)),
    "convolution": (lambda x, w: functional.conv2d(x, w, padding=1), [(2, 3, 8, 8), (4, 3, 3, 3)], 2 * 4 * 64 * 27),
    "convolution in groups": (
        lambda x, w: functional.conv2d(x, w, groups=2), [(2, 6, 8, 8), (4, 3, 3, 3)], 2 * 4 * 36 * 27
    ),
    "convolution in 3 dimensions": (functional.conv3d, [(2, 3, 5, 5, 5), (4, 3, 2, 2, 2)], 2 * 4 * 64 * 24),
    "transposed": (lambda x, w: functional.conv_transpose1d(x, w, stride=2), [(2, 3, 8), (3, 4, 5)], 2 * 8 * 3 * 4 * 5),
}  # fmt: skip


@pytest.mark.parametrize("name", PRODUCTS)
def test_flops_are_two_for_each_multiply_add_of_the_definition(name: str) -> None:
    function, shapes, products = PRODUCTS[name]
    assert counted(function, *shapes) == 2 * products


def test_a_chain_counts_the_products_in_their_best_order() -> None:
    assert counted(lambda *a: torch.linalg.multi_dot(a), (4, 50), (50, 6), (6, 7)) == 2 * (
        4 * 50 * 6 + 4 * 6 * 7
    )


@pytest.mark.parametrize(("offsets", "shapes", "products"), [
    ([8, 16], [(16, 32), (2, 32, 8)], 16 * 32 * 8),
    (None, [(2, 16, 32), (2, 32, 8)], 2 * 16 * 32 * 8),
    ([16, 32], [(16, 32), (32, 8)], 16 * 32 * 8),
])  # fmt: skip
def test_products_of_groups_count_each_row_once(
    offsets: list[int] | None, shapes: list[tuple[int, ...]], products: int
) -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    ends = None if offsets is None else torch.tensor(offsets, dtype=torch.int32)
    with FakeTensorMode(allow_non_fake_inputs=True):
        one, other = (torch.empty(shape, dtype=torch.bfloat16) for shape in shapes)
        with flop_counter() as counter:
            functional.grouped_mm(one, other, offs=ends)
    assert counter.get_total_flops() == 2 * products


@pytest.mark.parametrize("name", ["matrix @ vector", "baddbmm", "einsum to a matrix", "dot"])
def test_a_product_of_complex_numbers_is_four_of_real_ones(name: str) -> None:
    function, shapes, products = PRODUCTS[name]
    assert counted(function, *shapes, dtype=torch.complex64) == 8 * products


RECURRENT: dict[str, tuple[Callable[[], nn.Module], int]] = {
    "lstm": (lambda: nn.LSTM(12, 16), gates(4, 12, 16)),
    "two layers": (lambda: nn.LSTM(12, 16, num_layers=2, dropout=0.1), gates(4, 12, 16) + gates(4, 16, 16)),
    "both ways": (
        lambda: nn.LSTM(12, 16, num_layers=2, bidirectional=True), 2 * (gates(4, 12, 16) + gates(4, 32, 16))
    ),
    "no bias": (lambda: nn.LSTM(12, 16, bias=False), gates(4, 12, 16)),
    "projected": (lambda: nn.LSTM(12, 16, proj_size=6), gates(4, 12, 16, out=6)),
    "gru": (lambda: nn.GRU(12, 16, bidirectional=True), 2 * gates(3, 12, 16)),
    "rnn": (lambda: nn.RNN(12, 16, nonlinearity="relu"), gates(1, 12, 16)),
}  # fmt: skip


@pytest.mark.filterwarnings("ignore:LSTM with projections")
@pytest.mark.parametrize("on_gpu", [False, True], ids=["cpu", "gpu"])
@pytest.mark.parametrize("name", RECURRENT)
@pytest.mark.parametrize("batch_first", [False, True])
def test_recurrent_layers_count_as_they_are_defined_fused_or_not(
    name: str, on_gpu: bool, batch_first: bool
) -> None:
    make, products = RECURRENT[name]
    module = make()
    module.batch_first = batch_first
    table = describe(module, torch.zeros(3, 5, 12), memory=True, on_gpu=on_gpu, recompute=("none",))
    assert table.flops * 3 == 2 * 3 * 5 * products
    assert bool(table.notes) == on_gpu
    assert not on_gpu or "without cuDNN" in table.notes[0]


def test_the_fused_layer_of_an_encoder_in_evaluation_mode_counts_as_in_training() -> None:
    layer = nn.TransformerEncoderLayer(16, 2, 48, batch_first=True)
    rows = torch.zeros(3, 5, 16)
    trained = Model.from_module(layer, rows).flops
    assert trained == Model.from_module(layer.eval().requires_grad_(False), rows).flops
    assert trained == 2 * 5 * (4 * 16**2 + 2 * 16 * 48) + 4 * 5 * 5 * 16


class Solves(nn.Module):
    def __init__(self, operation: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.layer, self.operation = nn.Linear(6, 6), operation

    def forward(self, rows: Tensor) -> Any:
        return self.operation(self.layer(rows))


@pytest.mark.parametrize(("name", "operation"), [
    ("aten.linalg_inv_ex", torch.linalg.inv), ("aten.linalg_qr", torch.linalg.qr), ("aten._fft_r2c", torch.fft.rfft),
    ("aten._linalg_svd", torch.linalg.svd), ("aten.linalg_cholesky_ex", torch.linalg.cholesky),
    ("aten._linalg_solve_ex", lambda a: torch.linalg.solve(a, a)), ("aten.linalg_matrix_exp", torch.linalg.matrix_exp),
    ("aten._cdist_forward", lambda a: torch.cdist(a, a, p=1.0)),
])  # fmt: skip
def test_a_matrix_operation_without_a_formula_is_named(name: str, operation: Callable[[Tensor], Any]) -> None:
    (note,) = Model.from_module(Solves(operation), torch.zeros(2, 6, 6)).notes
    assert note.startswith(f"FLOPs and step time leave out {name}, for which there is no FLOP formula")


def test_elementwise_operations_are_not_named() -> None:
    layers = nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.GELU(), nn.Upsample(scale_factor=2, mode="bilinear"),
        nn.LocalResponseNorm(2), nn.MaxPool2d(2), nn.Flatten(), nn.LayerNorm(288), nn.GLU(), nn.Softmax(dim=1),
    )  # fmt: skip
    assert Model.from_module(layers, torch.zeros(2, 3, 8, 8)).notes == ()


def test_an_operation_that_a_user_registered_is_named_until_it_has_a_formula() -> None:
    with torch.library._scoped_library("shardscope_test", "DEF") as library:
        library.define("product(Tensor x) -> Tensor")
        library.impl("product", lambda x: x.clone(), "CompositeExplicitAutograd")
        table = Model.from_module(Solves(torch.ops.shardscope_test.product), torch.zeros(2, 6))
    assert "leave out shardscope_test.product," in table.notes[0]


def inverse_model() -> nn.Module:
    return nn.Sequential(nn.Unflatten(1, (8, 8)), Solves8(), nn.Flatten(), nn.Linear(64, 10))


class Solves8(nn.Module):
    def forward(self, rows: Tensor) -> Tensor:
        return torch.linalg.inv(rows + 8 * torch.eye(8))


def flat_model() -> nn.Module:
    return nn.Sequential(nn.Flatten(), inverse_model())


def test_a_prediction_names_what_it_leaves_out() -> None:
    predicted = ss.predict(ss.Job(model=flat_model, data="digits", batch=8, device="cpu"))
    (told,) = predicted.assumptions
    assert "leave out aten.linalg_inv_ex" in told
    assert told in repr(predicted)
    assert predicted.to_dict()["assumptions"] == [told]
