"""Every layer and loss of `torch.nn`: FLOPs by definition, and the peak of a step by the allocator.

`tests/campaigns/modules.py` tries all of them in four precisions.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence

from conformance.allocator import in_precision, peaks, sum_of
from conformance.torch_layers import LEFT_OUT, Case, torch_layers
from shardscope.errors import SpecError
from shardscope.training.describe import describe

CASES = {case.name: case for case in torch_layers(0)}
MENDED = {
    "fp32": (
        "ConvTranspose1d strided", "ConvTranspose2d strided", "ConvTranspose3d strided", "Embedding sparse",
        "EmbeddingBag", "EmbeddingBag sparse", "MSELoss", "SmoothL1Loss", "BCELoss", "NLLLoss2d",
    ),
    "fp64": ("Conv3d groups", "Conv3d plain"),
    "bf16-mixed": ("GRUCell", "HuberLoss", "BCEWithLogitsLoss"),
    "fp16-mixed": ("Conv1d plain", "Conv2d plain", "Conv3d groups", "ConvTranspose3d", "GRUCell"),
}  # fmt: skip
"""Layers and losses whose kernels take memory beside their results, in precisions in which that makes the peak."""


def test_every_layer_and_loss_of_torch_is_a_case_or_left_out_with_a_reason() -> None:
    named = {name.split()[0] for name in CASES}
    assert named | set(LEFT_OUT) == set(nn.modules.__all__)
    assert not named & set(LEFT_OUT)


@pytest.mark.sampled
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("name", "precision"), [(name, each) for each, names in MENDED.items() for name in names]
)
def test_flops_and_peak_are_those_of_a_real_step(name: str, precision: str) -> None:
    case: Case = CASES[name]
    torch.manual_seed(0)

    def loss(output: object, targets: tuple[Tensor, ...]) -> Tensor:
        return sum_of(output, None) if case.loss is None else case.loss(output, *targets)

    found = peaks(case.make(), case.inputs, precision, loss, in_precision(precision, case.targets))
    assert found.table.flops * len(case.inputs[0]) == pytest.approx(2 * case.products, rel=0.01)
    assert found.ratio == pytest.approx(1, abs=0.02)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("on_gpu", [False, True])
def test_grouped_products_are_traced_in_all_dtypes(dtype: torch.dtype, on_gpu: bool) -> None:
    class Experts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.zeros(4, 32, 16, dtype=dtype))

        def forward(self, rows: Tensor, ends: Tensor) -> Tensor:
            return torch._grouped_mm(rows, self.weight, ends)

    example = torch.zeros(64, 32, dtype=dtype), torch.tensor([8, 16, 32, 64], dtype=torch.int32)
    table = describe(Experts(), example, memory=True, on_gpu=on_gpu, recompute=("none",))
    assert table.flops * 64 == 2 * 64 * 32 * 16
    assert table.notes == ()
    assert table.layers[-1].output_bytes in (0, 16 * dtype.itemsize)


class Packs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(8, 8, batch_first=True)

    def forward(self, rows: Tensor) -> Tensor:
        packed = pack_padded_sequence(rows, torch.tensor([5, 3]), batch_first=True)
        return self.lstm(packed)[0].data


def test_a_refusal_of_packed_sequences_suggests_padded_input() -> None:
    packed = pack_padded_sequence(torch.zeros(5, 2, 8), torch.tensor([5, 3]))
    for module, example in (
        (nn.LSTM(8, 8), packed),
        (nn.LSTM(8, 8), (packed,)),
        (Packs(), torch.zeros(2, 5, 8)),
    ):
        with pytest.raises(SpecError, match="pass padded input"):
            describe(module, example)
