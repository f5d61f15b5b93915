# ruff: noqa: E501
"""FLOPs and peak memory of torch's layers and of public architectures, predicted from shapes and measured.

    python tests/campaigns/modules.py [--seed SEED]

Each row is one module in one precision: FLOPs over a count from the definition of the layer, and the predicted peak of a
training step over what torch's CPU allocator records. Sizes are drawn with the seed. Ends with the rows that are more
than 1 % off in FLOPs, or 2 % in memory.
"""

from __future__ import annotations

import argparse
import random
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).parents[1]))
import torch
from torch import Tensor, nn

from conformance.allocator import Peaks, peaks

PRECISIONS = ("fp32", "fp64", "bf16-mixed", "fp16-mixed")
FLOPS, MEMORY = 0.01, 0.02


class Case(NamedTuple):
    """A module, its inputs, and its multiply-adds for all of them, by definition."""

    name: str
    make: Callable[[], nn.Module]
    inputs: tuple[Tensor, ...] | dict[str, Tensor]
    products: int


class Given(nn.Module):
    """A layer of which inputs are trained, as within a model."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer, self.scale = layer, nn.Parameter(torch.ones(()))

    def forward(self, *inputs: Tensor) -> Any:
        return self.layer(*(each * self.scale if each.is_floating_point() else each for each in inputs))


def convolutions(draw: random.Random) -> Iterator[Case]:
    samples, inner, outer = draw.choice((8, 16)), draw.choice((16, 24, 32)), draw.choice((32, 48))
    for dims, size in ((1, 256), (2, 28), (3, 10)):
        rows = torch.rand(samples, inner, *[size] * dims)
        layer, back = (nn.Conv1d, nn.Conv2d, nn.Conv3d)[dims - 1], (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)[dims - 1]  # fmt: skip
        kinds: dict[str, tuple[dict[str, Any], int, int]] = {
            "": ({"kernel_size": 3}, size - 2, 1),
            "same": ({"kernel_size": 3, "padding": 1}, size, 1),
            "strided": ({"kernel_size": 3, "stride": 2}, (size - 3) // 2 + 1, 1),
            "dilated": ({"kernel_size": 3, "dilation": 2}, size - 4, 1),
            "plain": ({"kernel_size": 1}, size, 1),
            "groups": ({"kernel_size": 3, "groups": 4}, size - 2, 4),
        }
        for kind, (fields, out, groups) in kinds.items():
            wide = draw.choice((32, 48))
            products = samples * inner * wide // groups * out**dims * fields["kernel_size"] ** dims
            yield Case(
                f"conv{dims}d {kind}", lambda f=fields, w=wide, c=layer: Given(c(inner, w, **f)), (rows,), products
            )  # fmt: skip
        products = samples * inner * outer * (size * 3) ** dims
        yield Case(f"transposed {dims}d", lambda c=back: Given(c(inner, outer, 3)), (rows,), products)
    deep = torch.rand(samples, 32, 28, 28)
    yield Case("depthwise", lambda: Given(nn.Conv2d(32, 32, 3, groups=32)), (deep,), samples * 32 * 26**2 * 9)


def recurrent(draw: random.Random) -> Iterator[Case]:
    steps, samples, width, hidden = draw.randint(12, 40), draw.choice((8, 16)), 64, draw.choice((96, 128))
    rows = torch.rand(steps, samples, width)
    for kind, gates in ((nn.LSTM, 4), (nn.GRU, 3), (nn.RNN, 1)):
        one = gates * hidden * (width + hidden)
        after = gates * hidden * (2 * hidden + hidden)
        yield Case(kind.__name__, lambda k=kind: k(width, hidden), (rows,), steps * samples * one)
        yield Case(
            f"{kind.__name__} two layers, both ways",
            lambda k=kind: k(width, hidden, num_layers=2, bidirectional=True, dropout=0.1), (rows,),
            steps * samples * 2 * (one + after),
        )  # fmt: skip
    cells = ((nn.LSTMCell, 4), (nn.GRUCell, 3), (nn.RNNCell, 1))
    for cell, gates in cells:
        products = 256 * gates * hidden * (width + hidden)
        yield Case(cell.__name__, lambda k=cell: k(width, hidden), (torch.rand(256, width),), products)
    projected = 4 * hidden * (width + 32) + 32 * hidden
    yield Case(
        "LSTM projected", lambda: nn.LSTM(width, hidden, proj_size=32), (rows,), steps * samples * projected
    )


def dense(draw: random.Random) -> Iterator[Case]:
    samples, seq, width = draw.choice((8, 16)), draw.choice((64, 96)), draw.choice((64, 128))
    rows = torch.rand(samples, seq, width)
    tokens = samples * seq
    attention = tokens * 4 * width**2 + 2 * samples * seq * seq * width
    layer = attention + 2 * tokens * width * 4 * width
    yield Case("Linear", lambda: nn.Sequential(nn.Linear(width, 512), nn.ReLU(), nn.Linear(512, width)), (rows,), tokens * 1024 * width)  # fmt: skip
    yield Case("Bilinear", lambda: nn.Bilinear(48, 64, 32), (torch.rand(512, 48), torch.rand(512, 64)), 512 * 32 * (48 * 64 + 64))  # fmt: skip
    yield Case("MultiheadAttention", lambda: nn.MultiheadAttention(width, 4, batch_first=True), (rows, rows, rows), attention)  # fmt: skip
    yield Case("TransformerEncoderLayer", lambda: nn.TransformerEncoderLayer(width, 4, 4 * width, batch_first=True), (rows,), layer)  # fmt: skip
    yield Case("TransformerDecoderLayer", lambda: nn.TransformerDecoderLayer(width, 4, 4 * width, batch_first=True), (rows, rows), layer + attention)  # fmt: skip
    indices = torch.randint(1000, (samples, seq))
    yield Case("Embedding", lambda: nn.Sequential(nn.Embedding(1000, width), nn.Linear(width, 256)), (indices,), tokens * width * 256)  # fmt: skip
    yield Case("EmbeddingBag", lambda: nn.Sequential(nn.EmbeddingBag(1000, 256), nn.Linear(256, 512)), (indices,), samples * 256 * 512)  # fmt: skip


def elementwise(draw: random.Random) -> Iterator[Case]:
    """All other layers of `torch.nn`, which have no matrix products."""
    flat, images, volumes = torch.rand(64, 512), torch.rand(8, 16, 32, 32), torch.rand(4, 8, 12, 12, 12)
    lines = torch.rand(16, 16, 256)
    names = (
        "ELU Hardshrink Hardsigmoid Hardtanh Hardswish LeakyReLU LogSigmoid PReLU ReLU ReLU6 RReLU SELU CELU GELU Sigmoid "
        "SiLU Mish Softplus Softshrink Softsign Tanh Tanhshrink GLU Softmin Softmax LogSoftmax Dropout AlphaDropout Identity"
    )  # fmt: skip
    for name in names.split():
        needs_dim = name in ("Softmin", "Softmax", "LogSoftmax")
        yield Case(name, lambda n=name, d=needs_dim: Given(getattr(nn, n)(*([1] if d else []))), (flat,), 0)
    of_images: dict[str, nn.Module] = {
        "BatchNorm2d": nn.BatchNorm2d(16), "InstanceNorm2d": nn.InstanceNorm2d(16), "GroupNorm": nn.GroupNorm(4, 16),
        "LayerNorm": nn.LayerNorm(32), "RMSNorm": nn.RMSNorm(32), "LocalResponseNorm": nn.LocalResponseNorm(3),
        "MaxPool2d": nn.MaxPool2d(2), "AvgPool2d": nn.AvgPool2d(2), "LPPool2d": nn.LPPool2d(2, 2),
        "FractionalMaxPool2d": nn.FractionalMaxPool2d(3, output_size=8), "AdaptiveAvgPool2d": nn.AdaptiveAvgPool2d(4),
        "AdaptiveMaxPool2d": nn.AdaptiveMaxPool2d(4), "Upsample": nn.Upsample(scale_factor=2),
        "Upsample bilinear": nn.Upsample(scale_factor=2, mode="bilinear"), "PixelShuffle": nn.PixelShuffle(2),
        "PixelUnshuffle": nn.PixelUnshuffle(2), "ZeroPad2d": nn.ZeroPad2d(1), "ReflectionPad2d": nn.ReflectionPad2d(1),
        "ReplicationPad2d": nn.ReplicationPad2d(1), "CircularPad2d": nn.CircularPad2d(1), "Unfold": nn.Unfold(3),
        "Dropout2d": nn.Dropout2d(), "Softmax2d": nn.Softmax2d(), "Flatten": nn.Flatten(),
        "ChannelShuffle": nn.ChannelShuffle(4),
    }  # fmt: skip
    for name, layer in of_images.items():
        yield Case(name, lambda each=layer: Given(each), (images,), 0)
    for name, layer in {"BatchNorm1d": nn.BatchNorm1d(16), "MaxPool1d": nn.MaxPool1d(2), "AvgPool1d": nn.AvgPool1d(2)}.items():  # fmt: skip
        yield Case(name, lambda each=layer: Given(each), (lines,), 0)
    for name, layer in {"BatchNorm3d": nn.BatchNorm3d(8), "MaxPool3d": nn.MaxPool3d(2), "AvgPool3d": nn.AvgPool3d(2)}.items():  # fmt: skip
        yield Case(name, lambda each=layer: Given(each), (volumes,), 0)
    for name in ("CosineSimilarity", "PairwiseDistance"):
        yield Case(name, lambda n=name: Given(getattr(nn, n)()), (flat, flat + 1), 0)


def check(case: Case, precision: str) -> tuple[Peaks, float]:
    """The peaks of one case, and FLOPs over those by definition."""
    torch.manual_seed(0)
    found = peaks(case.make(), case.inputs, precision)
    samples = next(iter(case.inputs.values() if isinstance(case.inputs, dict) else case.inputs)).shape[0]
    counted = found.table.flops * samples
    return found, counted / (2 * case.products) if case.products else 1.0 + counted


def cases(seed: int) -> list[Case]:
    """All cases, with sizes drawn by the seed."""
    draw = random.Random(seed)
    return [*dense(draw), *recurrent(draw), *convolutions(draw), *elementwise(draw)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=0)
    warnings.simplefilter("ignore")
    misses = []
    total = 0
    for case in cases(parser.parse_args().seed):
        for precision in PRECISIONS:
            total += 1
            try:
                found, flops = check(case, precision)
            except Exception as error:
                print(
                    f"{case.name:<34} {precision:<11} {type(error).__name__}: {str(error).splitlines()[0][:80]}"
                )
                continue
            is_off = abs(flops - 1) > FLOPS or abs(found.ratio - 1) > MEMORY
            row = f"{case.name:<34} {precision:<11} FLOPs {flops:.4f}  peak {found.ratio:.4f} of {found.measured:,}"
            misses += [row] * is_off
            print(row, "<" * is_off, flush=True)
    print(f"\n{len(misses)} of {total} rows are off", *misses, sep="\n")


if __name__ == "__main__":
    main()
