"""Layers that torch cannot compute on this processor: found by trying, and refused before the first step."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import shardscope as ss
from shardscope.errors import SpecError
from shardscope.runtime.launcher.preflight import preflight
from shardscope.training.computable import require_computable, uncomputable_kinds, uncomputable_layers
from shardscope.training.precision import DTYPES, Precision

CPU = torch.device("cpu")
LAYERS = {
    "linear": (nn.Linear(8, 8), (4, 8)),
    "attention": (nn.TransformerEncoderLayer(8, 2, 16), (3, 5, 8)),
    "conv 1d": (nn.Conv1d(3, 4, 3), (2, 3, 9)),
    "grouped conv 2d": (nn.Conv2d(4, 8, 3, groups=4, bias=False), (2, 4, 9, 9)),
    "conv 3d": (nn.Conv3d(3, 4, 3, dilation=2), (2, 3, 9, 9, 9)),
    "transposed conv": (nn.ConvTranspose2d(3, 4, 3, stride=2), (2, 3, 9, 9)),
    "lstm": (nn.LSTM(4, 5), (3, 6, 4)),
    "two-way lstm": (nn.LSTM(4, 5, 2, bidirectional=True, batch_first=True), (3, 6, 4)),
    "projected lstm": (nn.LSTM(4, 5, proj_size=2), (3, 6, 4)),
    "lstm without bias": (nn.LSTM(4, 5, bias=False), (3, 6, 4)),
    "gru": (nn.GRU(4, 5), (3, 6, 4)),
    "rnn": (nn.RNN(4, 5, nonlinearity="relu"), (3, 6, 4)),
    "lstm cell": (nn.LSTMCell(4, 5), (3, 4)),
}


class Lstm(nn.Module):
    def __init__(self, *, is_cast: bool = True) -> None:
        super().__init__()
        self.cells = nn.LSTM(8, 6, batch_first=True)
        self.head = nn.Linear(6, 10)
        self.is_cast = is_cast

    def forward(self, images: Tensor) -> Tensor:
        with torch.autocast("cpu", enabled=self.is_cast and torch.is_autocast_enabled("cpu")):
            found = self.cells(images.reshape(-1, 8, 8).float())[0]
        return self.head(found[:, -1])


class Locked(Lstm):
    """Cannot be copied."""

    def __init__(self) -> None:
        super().__init__()
        self.lock = threading.Lock()


def plainly_fails(layer: nn.Module, shape: tuple[int, ...], dtype: torch.dtype) -> bool:
    """Whether a pass through the layer itself fails."""
    try:
        with torch.autocast("cpu", dtype):
            found = layer(torch.randn(shape))
        (found[0] if isinstance(found, tuple) else found).float().sum().backward()
    except RuntimeError:
        return True
    return False


@pytest.mark.filterwarnings("ignore:LSTM with projections")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", LAYERS)
def test_a_small_layer_fails_where_the_layer_itself_does(name: str, dtype: torch.dtype) -> None:
    layer, shape = LAYERS[name]
    found = uncomputable_layers(nn.Sequential(nn.Tanh(), layer), dtype)
    fails = plainly_fails(layer, shape, dtype)
    assert bool(found) == fails
    assert all(error and "\n" not in error for error in found.values())


def test_trying_layers_draws_no_random_number_of_the_job() -> None:
    before = torch.get_rng_state()
    uncomputable_layers(Lstm(), torch.float16)
    torch.set_rng_state(before)
    expected = torch.rand(3)
    torch.set_rng_state(before)
    model_free = nn.Sequential()
    uncomputable_layers(model_free, torch.float16)
    assert torch.equal(torch.rand(3), expected)


@pytest.mark.parametrize("precision", ["bf16-mixed", "fp16-mixed", "fp32", "fp64"])
def test_a_model_is_refused_only_where_it_runs_a_layer_that_fails(precision: str) -> None:
    mode = Precision(precision, CPU)
    dtype, images = DTYPES[precision], torch.rand(4, 1, 8, 8)
    mixed = precision.endswith("mixed")
    fails = mixed and plainly_fails(nn.LSTM(8, 6, batch_first=True), (4, 8, 8), dtype)
    if fails:
        with pytest.raises(SpecError, match=f"the layer 'cells' .LSTM. with precision='{precision}' on this"):
            require_computable(Lstm(), mode, lambda: images)
    else:
        require_computable(Lstm(), mode, lambda: images)
    require_computable(Lstm(is_cast=False), mode, lambda: images)
    require_computable(Locked(), mode, lambda: images)


def test_a_model_without_such_a_layer_is_not_run() -> None:
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 10))
    require_computable(model, Precision("bf16-mixed", CPU), lambda: pytest.fail("ran"))


def test_a_job_on_ranks_is_refused_before_its_first_step_and_by_the_preflight(tmp_path: Path) -> None:
    if "LSTM" not in uncomputable_kinds(torch.float16):
        pytest.skip("this processor's torch computes an LSTM in fp16")
    job = ss.Job(
        model=Lstm,
        data="digits",
        strategy="ring",
        world_size=2,
        steps=2,
        precision="fp16-mixed",
        device="cpu",
    )
    found = preflight(job, calls_functions=True)
    assert "cannot compute the layer 'cells'" in str(found.refusal)
    with pytest.raises(
        ss.RunFailed, match="before its first step: SpecError: torch cannot compute the layer"
    ):
        ss.launch(job, root=tmp_path).wait(60)
    around = job.replace(model=lambda: Lstm(is_cast=False))
    assert preflight(around, calls_functions=True).refusal is None
    assert preflight(job.replace(precision="fp32"), calls_functions=True).refusal is None


SCRIPT = """
import torch
from torch import nn
from shardscope.training.computable import require_computable, uncomputable_kinds
from shardscope.training.precision import Precision
kinds = uncomputable_kinds(torch.bfloat16)
try:
    require_computable(nn.LSTM(2, 2), Precision("bf16-mixed", torch.device("cpu")), lambda: torch.ones(1, 1, 2))
    print(kinds, "computes")
except ValueError as error:
    print(kinds, error)
"""


@pytest.mark.slow
def test_without_avx_512_an_lstm_in_bf16_is_refused_in_a_sentence() -> None:
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT], capture_output=True, text=True, check=True, timeout=200,
        env={**os.environ, "ATEN_CPU_CAPABILITY": "avx2", "ONEDNN_MAX_CPU_ISA": "AVX2"},
    )  # fmt: skip
    kinds, _, said = done.stdout.strip().partition("] ")
    assert said == "computes" if kinds == "[" else "'model' (LSTM) with precision='bf16-mixed'" in said
