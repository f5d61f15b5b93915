"""Models as users bring them, each with its data and loss: ordinary ones, and every oddity that has been met.

All are small enough for a step in a millisecond. Weights are drawn from torch's global generator, rows from one of
their own. A model that a pipeline can cut is an `nn.Sequential`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils.parametrizations import weight_norm
from torch.utils import _pytree as pytree
from torch.utils.checkpoint import checkpoint

ROWS, WIDTH, CLASSES, VOCAB, TOKENS = 150, 6, 4, 11, 5


class Rows:
    """Inputs and targets, either of them any nest of tensors."""

    def __init__(self, inputs: Any, targets: Any) -> None:
        self.inputs, self.targets = inputs, targets

    def __len__(self) -> int:
        return len(pytree.tree_leaves(self.inputs)[0])

    def batch(self, rows: Tensor) -> tuple[Any, Any]:
        return pytree.tree_map(lambda leaf: leaf[rows], (self.inputs, self.targets))


def _generator() -> torch.Generator:
    return torch.Generator().manual_seed(11)


def vectors() -> Rows:
    x = torch.randn(ROWS, WIDTH, generator=_generator())
    return Rows(x, x[:, :CLASSES].argmax(dim=1))


def named_vectors() -> Rows:
    x, y = vectors().batch(torch.arange(ROWS))
    return Rows({"left": x[:, :3], "right": x[:, 3:]}, y)


def images() -> Rows:
    x = torch.randn(ROWS, 1, 6, 6, generator=_generator())
    return Rows(x, (x.mean(dim=(1, 2, 3)) > 0).long())


def series() -> Rows:
    x = torch.randn(ROWS, TOKENS, WIDTH, generator=_generator())
    return Rows(x, x[:, -1, :CLASSES].argmax(dim=1))


def tokens() -> Rows:
    x = torch.randint(VOCAB, (ROWS, TOKENS + 1), generator=_generator())
    return Rows(x[:, :-1], x[:, 1:])


def labelled_tokens() -> Rows:
    x = torch.randint(VOCAB, (ROWS, TOKENS), generator=_generator())
    return Rows(x, x.sum(dim=1) % CLASSES)


def numbers() -> Rows:
    x = torch.randn(ROWS, WIDTH, generator=_generator())
    return Rows(x, x.sin().sum(dim=1, keepdim=True))


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, 9), nn.Tanh(), *_hidden(3), nn.Linear(9, CLASSES))


def deep() -> nn.Module:
    """More layers than any pipeline here has stages."""
    return nn.Sequential(nn.Linear(WIDTH, 9), *_hidden(10), nn.Linear(9, CLASSES))


def regression() -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, 9), nn.Tanh(), *_hidden(4), nn.Linear(9, 1))


def _hidden(layers: int) -> list[nn.Module]:
    return [nn.Sequential(nn.Linear(9, 9), nn.Tanh()) for _ in range(layers)]


def conv_batchnorm() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 4, 3), nn.BatchNorm2d(4), nn.ReLU(),
        nn.Conv2d(4, 4, 1), nn.ReLU(), nn.Flatten(), nn.Linear(16, 2),
    )  # fmt: skip


def frozen() -> nn.Module:
    model = mlp()
    model[0].requires_grad_(False)
    return model


def twice() -> nn.Module:
    shared = nn.Linear(9, 9)
    return nn.Sequential(
        nn.Linear(WIDTH, 9), nn.Tanh(), shared, nn.Tanh(), shared, nn.Tanh(), nn.Linear(9, 9), nn.Tanh(),
        nn.Linear(9, 9), nn.Tanh(), nn.Linear(9, CLASSES),
    )  # fmt: skip


class Lstm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cells = nn.LSTM(WIDTH, 7, num_layers=2, batch_first=True)
        self.head = nn.Linear(7, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        _, (hidden, _) = self.cells(x)
        return self.head(hidden[-1])


class Tied(nn.Module):
    """The embedding's weights are those of the head."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCAB, 8)
        self.block = nn.Sequential(nn.Linear(8, 8), nn.GELU())
        self.head = nn.Linear(8, VOCAB, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.block(self.embedding(tokens)))


class Transformer(nn.Module):
    """A causal block of torch's own, whose attention reads its projections' weights itself."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCAB, 8)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True, norm_first=True)
            for _ in range(2)
        )
        self.head = nn.Linear(8, VOCAB)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        mask = torch.full((TOKENS, TOKENS), float("-inf"), dtype=x.dtype).triu(1)
        for layer in self.layers:
            x = layer(x, src_mask=mask)
        return self.head(x)


class Containers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.heads = nn.ModuleDict({"coarse": nn.Linear(WIDTH, CLASSES), "fine": nn.Linear(WIDTH, CLASSES)})
        self.offsets = nn.ParameterList([torch.zeros(WIDTH) for _ in range(3)])

    def forward(self, x: Tensor) -> Tensor:
        for block, offset in zip(self.blocks, self.offsets, strict=True):
            x = x + (block(x) + offset).tanh()
        return self.heads["coarse"](x) + self.heads["fine"](x)


class Residual(nn.Module):
    """Base of models around two blocks and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(2))
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Any:
        for block in self.blocks:
            x = x + block(x)
        return self.head(x)


class InPlace(Residual):
    """Changes its blocks' outputs, which are views of what their linear layers compute, in place."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Tanh(), nn.Linear(WIDTH, WIDTH)) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            y = block(x)
            y += x
            x = y
        return self.head(x.mean(dim=1))


class Borrowed(Residual):
    """Reads its head's weight itself."""

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + block(x)
        return functional.linear(x, self.head.weight, 2 * self.head.bias)


class OwnRecompute(Residual):
    """Recomputes its blocks by torch's own `checkpoint`."""

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        return self.head(x)


class WeightNorm(Residual):
    def __init__(self) -> None:
        super().__init__()
        for block in self.blocks:
            weight_norm(block[0])


class Scalars(Residual):
    """Has a temperature of no dimension, and a parameter of no elements."""

    def __init__(self) -> None:
        super().__init__()
        self.temperature = nn.Parameter(torch.tensor(1.5))
        self.none = nn.Parameter(torch.zeros(0, CLASSES))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.temperature + self.none.sum()


class Unused(Residual):
    def __init__(self) -> None:
        super().__init__()
        self.spare = nn.Linear(3, 3)


class Late(Residual):
    """A layer that is first used once the gate has moved: in the second step."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Parameter(torch.ones(1))
        self.late = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = x * self.gate
        return super().forward(x if float(self.gate.detach()) == 1 else x + self.late(x))


class Branch(Residual):
    """Takes one of two equal blocks, as the micro-batch has it."""

    def forward(self, x: Tensor) -> Tensor:
        return self.head(x + self.blocks[int(x.mean() > 0)](x))


class Several(Residual):
    def forward(self, x: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        for block in self.blocks:
            x = x + block(x)
        return x, {"logits": self.head(x)}


def several_loss(output: tuple[Tensor, dict[str, Tensor]], target: Tensor) -> Tensor:
    hidden, scores = output
    return functional.cross_entropy(scores["logits"], target) + 0.01 * hidden.square().mean()


@dataclass
class Hidden:
    """What a block hands on, in a form that torch's pytree does not know."""

    value: Tensor


class Wrapping(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, hidden: Hidden) -> Hidden:
        return Hidden(hidden.value + self.linear(hidden.value).tanh())


class Objects(nn.Module):
    """Blocks that take and return objects."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Wrapping() for _ in range(3))
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        hidden = Hidden(x)
        for block in self.blocks:
            hidden = block(hidden)
        return self.head(hidden.value)


class Keywords(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(3, 9), nn.Linear(3, 9)
        self.head = nn.Linear(9, CLASSES)

    def forward(self, *, left: Tensor, right: Tensor) -> Tensor:
        return self.head((self.left(left) * self.right(right)).tanh())


class Sparse(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCAB, 8, sparse=True)
        self.head = nn.Linear(8, CLASSES)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.embedding(tokens).mean(dim=1))


class EvenLinear(nn.LazyLinear):
    """Whose weights do not hang on when it takes its shape."""

    def reset_parameters(self) -> None:
        if self.in_features:
            with torch.no_grad():
                self.weight.copy_(torch.linspace(-0.5, 0.5, self.weight.numel()).view_as(self.weight))
                self.bias.zero_()


def lazy() -> nn.Module:
    return nn.Sequential(
        EvenLinear(9), nn.Tanh(), EvenLinear(9), nn.Tanh(), nn.Linear(9, 9), nn.Tanh(), nn.Linear(9, 9), nn.Tanh(),
        nn.Linear(9, 9), nn.Tanh(), nn.Linear(9, CLASSES),
    )  # fmt: skip


class Brought(NamedTuple):
    """A model with its data and loss."""

    model: Callable[[], nn.Module]
    data: Callable[[], Rows] = vectors
    loss: Any = "cross-entropy"


MODELS: dict[str, Brought] = {
    "mlp": Brought(mlp),
    "deep": Brought(deep),
    "regression": Brought(regression, numbers, "mse"),
    "conv-batchnorm": Brought(conv_batchnorm, images),
    "frozen": Brought(frozen),
    "twice": Brought(twice),
    "lstm": Brought(Lstm, series),
    "tied": Brought(Tied, tokens),
    "transformer": Brought(Transformer, tokens),
    "containers": Brought(Containers),
    "in-place": Brought(InPlace, series),
    "borrowed": Brought(Borrowed),
    "own-recompute": Brought(OwnRecompute),
    "weight-norm": Brought(WeightNorm),
    "scalars": Brought(Scalars),
    "unused": Brought(Unused),
    "late": Brought(Late),
    "branch": Brought(Branch),
    "several": Brought(Several, vectors, several_loss),
    "objects": Brought(Objects),
    "keywords": Brought(Keywords, named_vectors),
    "sparse": Brought(Sparse, labelled_tokens),
    "lazy": Brought(lazy),
}
"""Every model of the grid by name."""
