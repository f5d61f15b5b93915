"""Memory of CPU kernels beside their results, as torch's allocator records it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from conformance.allocator import allocated, peaks
from shardscope.training.onednn import OneDNN, scratch_bytes

ROWS = torch.zeros(24, 16, 48)
LSTMS: dict[str, dict[str, Any]] = {
    "one": {},
    "two layers": {"num_layers": 2, "dropout": 0.1},
    "both ways": {"bidirectional": True},
    "three both ways": {"num_layers": 3, "bidirectional": True, "batch_first": True},
    "no bias": {"bias": False},
    "projected": {"proj_size": 24},
}


@pytest.mark.filterwarnings("ignore:LSTM with projections")
@pytest.mark.parametrize("precision", ["fp32", "fp64"])
@pytest.mark.parametrize("name", LSTMS)
def test_an_lstm_needs_what_the_allocator_records(name: str, precision: str) -> None:
    found = peaks(nn.LSTM(48, 64, **LSTMS[name]), (ROWS,), precision)
    assert found.ratio == pytest.approx(1, abs=0.02)


def layer(steps: int, samples: int, width: int, hidden: int) -> list[Any]:
    shapes = [
        (steps, samples, width),
        (4 * hidden, width),
        (4 * hidden, hidden),
        (4 * hidden,),
        (4 * hidden,),
    ]
    tensors: list[Tensor] = [torch.zeros(shape) for shape in [*shapes, (samples, hidden), (samples, hidden)]]
    return [*tensors, False, [], 2, hidden, 1, True, False, False, True]


@pytest.mark.parametrize(
    "sizes", [(20, 16, 64, 128), (1, 1, 16, 16), (5, 3, 17, 19), (20, 16, 300, 128), (7, 9, 64, 256)]
)
def test_a_fused_layer_keeps_and_takes_its_bytes(sizes: tuple[int, int, int, int]) -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    operation = torch.ops.aten.mkldnn_rnn_layer.default
    arguments = layer(*sizes)
    real = operation(*arguments)
    peak, end = allocated(lambda: operation(*arguments))
    with FakeTensorMode() as fakes, OneDNN():
        given = [fakes.from_tensor(each) if isinstance(each, Tensor) else each for each in arguments]
        traced = operation(*given)
        scratch = scratch_bytes(operation, given, traced)
    assert [each.nbytes for each in traced] == [each.nbytes for each in real]
    assert scratch == peak - end
