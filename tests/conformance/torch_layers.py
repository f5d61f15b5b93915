# ruff: noqa: E501
"""Every layer and every loss of `torch.nn` as a case: a module, its inputs, and its multiply-adds by definition."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

LEFT_OUT = {
    **dict.fromkeys(
        ("Module", "Container", "Sequential", "ModuleList", "ModuleDict"), "it only contains layers"
    ),
    **dict.fromkeys(("ParameterList", "ParameterDict"), "it only contains parameters"),
    **dict.fromkeys(("RNNBase", "RNNCellBase"), "it is a base class"),
    "LinearCrossEntropyOptions": "it is a setting of LinearCrossEntropyLoss",
    "SyncBatchNorm": "it runs on GPUs only",
}
"""Public classes of `torch.nn` that no case is named after, each with the reason."""


class Case(NamedTuple):
    """A module, its inputs, and its multiply-adds for all of them; its loss is the mean of its outputs unless given.

    Attributes:
        name: Begins with the class in `torch.nn`.
        make: Function that returns the module.
        inputs: Arguments of the module.
        products: Multiply-adds of the forward pass, by the definition of the layer.
        loss: Loss, called with the module's output and the targets.
        targets: Further arguments of the loss.
    """

    name: str
    make: Callable[[], nn.Module]
    inputs: tuple[Tensor, ...]
    products: int = 0
    loss: nn.Module | None = None
    targets: tuple[Any, ...] = ()


class Given(nn.Module):
    """A layer of which inputs are trained, as within a model."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer, self.scale = layer, nn.Parameter(torch.ones(()))

    def forward(self, *inputs: Tensor) -> Any:
        return self.layer(*(each * self.scale if each.is_floating_point() else each for each in inputs))


class Unpooled(nn.Module):
    """A maximum pool, and its inverse."""

    def __init__(self, pool: nn.Module, inverse: nn.Module) -> None:
        super().__init__()
        self.pool, self.inverse = pool, inverse

    def forward(self, rows: Tensor) -> Any:
        return self.inverse(*self.pool(rows))


def torch_layers(seed: int) -> list[Case]:
    """Return all cases, with sizes drawn by the seed."""
    draw = random.Random(seed)
    found = [*_dense(draw), *_recurrent(draw), *_convolutions(draw), *_elementwise(draw), *_placed(draw)]
    return [*found, *_losses(draw), *_lazy(draw)]


def _convolutions(draw: random.Random) -> Iterator[Case]:
    samples, inner, outer = draw.choice((8, 16)), draw.choice((16, 24, 32)), draw.choice((32, 48))
    for dims, size in ((1, 256), (2, 28), (3, 10)):
        rows = torch.rand(samples, inner, *[size] * dims)
        layer, back = (nn.Conv1d, nn.Conv2d, nn.Conv3d)[dims - 1], (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)[dims - 1]  # fmt: skip
        kinds: dict[str, tuple[dict[str, Any], int, int]] = {
            "": ({"kernel_size": 3}, size - 2, 1),
            " same": ({"kernel_size": 3, "padding": 1}, size, 1),
            " strided": ({"kernel_size": 3, "stride": 2}, (size - 3) // 2 + 1, 1),
            " dilated": ({"kernel_size": 3, "dilation": 2}, size - 4, 1),
            " plain": ({"kernel_size": 1}, size, 1),
            " groups": ({"kernel_size": 3, "groups": 4}, size - 2, 4),
        }
        for kind, (fields, out, groups) in kinds.items():
            wide = draw.choice((32, 48))
            products = samples * inner * wide // groups * out**dims * fields["kernel_size"] ** dims
            yield Case(
                f"Conv{dims}d{kind}", lambda f=fields, w=wide, c=layer: Given(c(inner, w, **f)), (rows,), products
            )  # fmt: skip
        products = samples * inner * outer * (size * 3) ** dims
        yield Case(f"ConvTranspose{dims}d", lambda c=back: Given(c(inner, outer, 3)), (rows,), products)
        yield Case(f"ConvTranspose{dims}d strided", lambda c=back: Given(c(inner, outer, 2, 2)), (rows,), samples * inner * outer * (size * 2) ** dims)  # fmt: skip
    deep = torch.rand(samples, 32, 28, 28)
    yield Case(
        "Conv2d depthwise", lambda: Given(nn.Conv2d(32, 32, 3, groups=32)), (deep,), samples * 32 * 26**2 * 9
    )


def _recurrent(draw: random.Random) -> Iterator[Case]:
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


def _dense(draw: random.Random) -> Iterator[Case]:
    samples, seq, width = draw.choice((8, 16)), draw.choice((64, 96)), draw.choice((64, 128))
    rows = torch.rand(samples, seq, width)
    tokens = samples * seq
    attention = tokens * 4 * width**2 + 2 * samples * seq * seq * width
    forward = 2 * tokens * width * 4 * width
    layer = {"d_model": width, "nhead": 4, "dim_feedforward": 4 * width, "batch_first": True}
    yield Case("Linear", lambda: nn.Sequential(nn.Linear(width, 512), nn.ReLU(), nn.Linear(512, width)), (rows,), tokens * 1024 * width)  # fmt: skip
    yield Case("Bilinear", lambda: nn.Bilinear(48, 64, 32), (torch.rand(512, 48), torch.rand(512, 64)), 512 * 32 * (48 * 64 + 64))  # fmt: skip
    yield Case("MultiheadAttention", lambda: nn.MultiheadAttention(width, 4, batch_first=True), (rows, rows, rows), attention)  # fmt: skip
    yield Case("TransformerEncoderLayer", lambda: nn.TransformerEncoderLayer(**layer), (rows,), attention + forward)  # fmt: skip
    yield Case("TransformerDecoderLayer", lambda: nn.TransformerDecoderLayer(**layer), (rows, rows), 2 * attention + forward)  # fmt: skip
    yield Case("TransformerEncoder", lambda: nn.TransformerEncoder(nn.TransformerEncoderLayer(**layer), 2), (rows,), 2 * (attention + forward))  # fmt: skip
    yield Case("TransformerDecoder", lambda: nn.TransformerDecoder(nn.TransformerDecoderLayer(**layer), 2), (rows, rows), 2 * (2 * attention + forward))  # fmt: skip
    yield Case(
        "Transformer", lambda: nn.Transformer(num_encoder_layers=1, num_decoder_layers=1, **layer), (rows, rows), 3 * attention + 2 * forward
    )  # fmt: skip
    indices = torch.randint(1000, (samples, seq))
    for kind, fields in (("", {}), (" sparse", {"sparse": True})):
        yield Case(f"Embedding{kind}", lambda f=fields: nn.Sequential(nn.Embedding(1000, width, **f), nn.Linear(width, 256)), (indices,), tokens * width * 256)  # fmt: skip
        yield Case(f"EmbeddingBag{kind}", lambda f=fields: nn.Sequential(nn.EmbeddingBag(1000, 256, **f), nn.Linear(256, 512)), (indices,), samples * 256 * 512)  # fmt: skip


def _elementwise(draw: random.Random) -> Iterator[Case]:
    """Layers without matrix products, of rows and images."""
    flat, images = torch.rand(64, 512), torch.rand(8, 16, 32, 32)
    names = (
        "ELU Hardshrink Hardsigmoid Hardtanh Hardswish LeakyReLU LogSigmoid PReLU ReLU ReLU6 RReLU SELU CELU GELU Sigmoid "
        "SiLU Mish Softplus Softshrink Softsign Tanh Tanhshrink GLU Softmin Softmax LogSoftmax Dropout AlphaDropout Identity"
    )  # fmt: skip
    for name in names.split():
        needs_dim = name in ("Softmin", "Softmax", "LogSoftmax")
        yield Case(name, lambda n=name, d=needs_dim: Given(getattr(nn, n)(*([1] if d else []))), (flat,))
    layers: dict[str, nn.Module] = {
        "Threshold": nn.Threshold(0.1, 0), "Unflatten": nn.Unflatten(1, (16, 32)), "Flatten": nn.Flatten(),
        "GroupNorm": nn.GroupNorm(4, 16), "LayerNorm": nn.LayerNorm(32), "RMSNorm": nn.RMSNorm(32),
        "LocalResponseNorm": nn.LocalResponseNorm(3), "CrossMapLRN2d": nn.CrossMapLRN2d(3),
        "Upsample": nn.Upsample(scale_factor=2), "Upsample bilinear": nn.Upsample(scale_factor=2, mode="bilinear"),
        "UpsamplingNearest2d": nn.UpsamplingNearest2d(scale_factor=2), "UpsamplingBilinear2d": nn.UpsamplingBilinear2d(scale_factor=2),
        "PixelShuffle": nn.PixelShuffle(2), "PixelUnshuffle": nn.PixelUnshuffle(2), "ChannelShuffle": nn.ChannelShuffle(4),
        "Unfold": nn.Unfold(3), "Softmax2d": nn.Softmax2d(), "FeatureAlphaDropout": nn.FeatureAlphaDropout(),
    }  # fmt: skip
    for name, layer in layers.items():
        rows = flat if name in ("Threshold", "Unflatten") else images
        yield Case(name, lambda each=layer: Given(each), (rows,))
    yield Case("Fold", lambda: Given(nn.Fold(32, 3)), (torch.rand(8, 16 * 9, 900),))
    for name in ("CosineSimilarity", "PairwiseDistance"):
        yield Case(name, lambda n=name: Given(getattr(nn, n)()), (flat, flat + 1))


def _placed(draw: random.Random) -> Iterator[Case]:
    """Layers without matrix products, of lines, images and volumes."""
    for dims, size in ((1, 256), (2, 32), (3, 12)):
        channels = draw.choice((8, 16))
        rows = torch.rand(8, channels, *[size] * dims)
        fields: dict[str, tuple[Any, ...]] = {
            "BatchNorm": (channels,), "InstanceNorm": (channels,), "MaxPool": (2,), "AvgPool": (2,), "LPPool": (2, 2),
            "AdaptiveAvgPool": (4,), "AdaptiveMaxPool": (4,), "Dropout": (), "ZeroPad": (1,), "ReflectionPad": (1,),
            "ReplicationPad": (1,), "CircularPad": (1,), "ConstantPad": (1, 0.5),
        }  # fmt: skip
        for name, given in fields.items():
            full = f"{name}{dims}d"
            yield Case(full, lambda n=full, g=given: Given(getattr(nn, n)(*g)), (rows,))
        yield Case(
            f"MaxUnpool{dims}d",
            lambda d=dims: Given(
                Unpooled(
                    getattr(nn, f"MaxPool{d}d")(2, return_indices=True), getattr(nn, f"MaxUnpool{d}d")(2)
                )
            ),
            (rows,),
        )
        if dims > 1:
            name = f"FractionalMaxPool{dims}d"
            yield Case(name, lambda n=name: Given(getattr(nn, n)(3, output_size=8)), (rows,))


def _losses(draw: random.Random) -> Iterator[Case]:
    samples, width, many = draw.choice((512, 768)), draw.choice((64, 96)), 256
    rows, ten = torch.rand(samples, width), torch.rand(samples, many)
    signs, classes = torch.randint(2, (samples,)) * 2.0 - 1, torch.randint(10, (samples,))
    given: dict[str, tuple[nn.Module, tuple[Any, ...]]] = {
        "L1Loss": (nn.L1Loss(), (ten,)), "MSELoss": (nn.MSELoss(), (ten,)), "HuberLoss": (nn.HuberLoss(), (ten,)),
        "SmoothL1Loss": (nn.SmoothL1Loss(), (ten,)), "CrossEntropyLoss": (nn.CrossEntropyLoss(), (classes,)),
        "CrossEntropyLoss soft": (nn.CrossEntropyLoss(label_smoothing=0.1), (ten,)),
        "BCEWithLogitsLoss": (nn.BCEWithLogitsLoss(), (ten,)), "PoissonNLLLoss": (nn.PoissonNLLLoss(), (ten,)),
        "GaussianNLLLoss": (nn.GaussianNLLLoss(), (ten, ten)), "HingeEmbeddingLoss": (nn.HingeEmbeddingLoss(), (ten,)),
        "MultiLabelMarginLoss": (nn.MultiLabelMarginLoss(), (torch.randint(10, (samples, many)),)),
        "MultiLabelSoftMarginLoss": (nn.MultiLabelSoftMarginLoss(), (ten,)), "SoftMarginLoss": (nn.SoftMarginLoss(), (ten,)),
        "MultiMarginLoss": (nn.MultiMarginLoss(), (classes,)), "CosineEmbeddingLoss": (nn.CosineEmbeddingLoss(), (ten, signs)),
        "MarginRankingLoss": (nn.MarginRankingLoss(), (ten, signs[:, None])), "TripletMarginLoss": (nn.TripletMarginLoss(), (ten, ten)),
        "TripletMarginWithDistanceLoss": (nn.TripletMarginWithDistanceLoss(), (ten, ten)),
    }  # fmt: skip
    for name, (loss, targets) in given.items():
        yield Case(name, lambda: nn.Linear(width, many), (rows,), samples * width * many, loss, targets)
    activated: dict[str, tuple[nn.Module, nn.Module, tuple[Any, ...]]] = {
        "NLLLoss": (nn.LogSoftmax(1), nn.NLLLoss(), (classes,)),
        "KLDivLoss": (nn.LogSoftmax(1), nn.KLDivLoss(reduction="batchmean"), (ten,)),
    }
    for name, (last, loss, targets) in activated.items():
        yield Case(name, lambda each=last: nn.Sequential(nn.Linear(width, many), each), (rows,), samples * width * many, loss, targets)  # fmt: skip
    images, labels = torch.rand(8, 16, 32, 32), torch.randint(10, (8, 32, 32))
    pixels = 8 * 32 * 32 * 16 * 10
    scores = lambda: nn.Sequential(nn.Conv2d(16, 10, 1), nn.LogSoftmax(1))
    yield Case("BCELoss", lambda: nn.Sequential(nn.Linear(width, many), nn.Sigmoid()), (rows,), samples * width * many, nn.BCELoss(), (ten,))  # fmt: skip
    yield Case("NLLLoss2d", scores, (images,), pixels, nn.NLLLoss(), (labels,))
    steps, lengths = torch.rand(32, 64, width), torch.full((64,), 32)
    yield Case(
        "CTCLoss", lambda: nn.Sequential(nn.Linear(width, 10), nn.LogSoftmax(2)), (steps,), 32 * 64 * width * 10,
        nn.CTCLoss(), (torch.randint(1, 10, (64, 12)), lengths, torch.full((64,), 12)),
    )  # fmt: skip
    yield Case("LinearCrossEntropyLoss", lambda: nn.LinearCrossEntropyLoss(width, 50), (rows, classes), samples * width * 50)  # fmt: skip
    yield Case(
        "AdaptiveLogSoftmaxWithLoss", lambda: nn.AdaptiveLogSoftmaxWithLoss(width, 50, [10]), (rows, classes), samples * width * 11
    )  # fmt: skip


def _lazy(draw: random.Random) -> Iterator[Case]:
    """Lazy layers after the forward pass that they need to know their sizes."""

    def known(layer: nn.Module, rows: Tensor) -> nn.Module:
        layer(rows)
        return Given(layer)

    flat, inner, outer = torch.rand(64, 96), draw.choice((16, 32)), draw.choice((32, 48))
    yield Case("LazyLinear", lambda: known(nn.LazyLinear(128), flat), (flat,), 64 * 96 * 128)
    for dims, size in ((1, 256), (2, 28), (3, 10)):
        rows = torch.rand(8, inner, *[size] * dims)
        products = 8 * inner * outer * 3**dims
        for name, places in (("LazyConv", size - 2), ("LazyConvTranspose", size)):
            full = f"{name}{dims}d"
            yield Case(full, lambda n=full, r=rows: known(getattr(nn, n)(outer, 3), r), (rows,), products * places**dims)  # fmt: skip
        for name in (f"LazyBatchNorm{dims}d", f"LazyInstanceNorm{dims}d"):
            yield Case(name, lambda n=name, r=rows: known(getattr(nn, n)(), r), (rows,))
