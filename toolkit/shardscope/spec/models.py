"""The built-in models of jobs: their shapes and exact parameter counts, without torch.

`MODELS` maps each name to a frozen config; `shardscope.training.models.build_model` builds the module.
No model has batch normalisation or dropout, because either makes results depend on how a batch is split over ranks.
"""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING, ClassVar, Literal, Self

from pydantic import model_validator

from shardscope.errors import SpecError, unknown_name
from shardscope.spec._base import Spec
from shardscope.spec.divisors import divisors_text
from shardscope.spec.mixture import RoutedMixture
from shardscope.spec.numbers import Count

if TYPE_CHECKING:
    from shardscope.spec.model.transformer import Transformer

Modality = Literal["tokens", "images"]


def _linear(inputs: int, outputs: int) -> int:
    return inputs * outputs + outputs


def _conv3x3(inputs: int, outputs: int) -> int:
    return 9 * inputs * outputs


def _norm(width: int) -> int:
    return 2 * width


def _require_divides(field: str, divisor: int, of: str, number: int) -> None:
    if number % divisor:
        raise SpecError(
            f"{field}={divisor} does not divide {of}={number}; use one of {divisors_text(number, near=divisor)}"
        )


class MLPConfig(Spec):
    """MLP on flattened images; each hidden layer is a linear layer, LayerNorm and GELU."""

    reads: ClassVar[Modality] = "images"

    kind: Literal["mlp"] = "mlp"
    inputs: Count = 64
    """Number of pixel values in one image, over all channels."""
    hidden: Count = 128
    layers: Count = 3
    """Number of hidden layers."""
    classes: Count = 10

    @property
    def num_layers_in_order(self) -> int:
        """Number of layers between which a pipeline can split the model: the hidden layers and the head."""
        return self.layers + 1

    @property
    def num_params(self) -> int:
        """Exact number of trainable parameters."""
        widths = [self.inputs] + [self.hidden] * self.layers
        hidden_layers = sum(_linear(inputs, outputs) + _norm(outputs) for inputs, outputs in pairwise(widths))
        return hidden_layers + _linear(self.hidden, self.classes)


class CNNConfig(Spec):
    """CNN: a 3x3 convolution, GroupNorm, ReLU and 2x2 pooling per entry of `channels`, then global average pooling."""

    reads: ClassVar[Modality] = "images"

    kind: Literal["cnn"] = "cnn"
    in_channels: Count = 1
    channels: tuple[Count, ...] = (16, 32, 64)
    groups: Count = 4
    """Groups of the GroupNorm; must divide every entry of `channels`."""
    classes: Count = 10

    @model_validator(mode="after")
    def _check(self) -> Self:
        if not self.channels:
            raise SpecError(
                "channels=() gives a model without layers; give at least one width, as in channels=(16,)"
            )
        for width in self.channels:
            _require_divides("groups", self.groups, "channels", width)
        return self

    @property
    def num_layers_in_order(self) -> int:
        """Number of layers between which a pipeline can split the model: the convolutions and the head."""
        return len(self.channels) + 1

    @property
    def num_params(self) -> int:
        """Exact number of trainable parameters."""
        widths = (self.in_channels, *self.channels)
        convolutions = sum(_conv3x3(inputs, outputs) + _norm(outputs) for inputs, outputs in pairwise(widths))
        return convolutions + _linear(self.channels[-1], self.classes)


class ResNetConfig(Spec):
    """The CIFAR ResNet of He et al. (arXiv 1512.03385, section 4.2) with GroupNorm in place of BatchNorm.

    Stage `s` has `blocks_per_stage` blocks of two 3x3 convolutions and `width * 2**s` channels;
    every stage but the first halves the image.
    """

    reads: ClassVar[Modality] = "images"

    kind: Literal["resnet"] = "resnet"
    in_channels: Count = 1
    width: Count = 16
    stages: Count = 3
    blocks_per_stage: Count = 2
    groups: Count = 4
    """Groups of the GroupNorm; must divide `width`."""
    classes: Count = 10

    @model_validator(mode="after")
    def _check(self) -> Self:
        _require_divides("groups", self.groups, "width", self.width)
        return self

    @property
    def channels(self) -> tuple[int, ...]:
        """Channels of every block, in order."""
        return tuple(
            self.width * 2**stage for stage in range(self.stages) for _ in range(self.blocks_per_stage)
        )

    @property
    def num_layers_in_order(self) -> int:
        """Number of layers between which a pipeline can split the model: stem, blocks and head."""
        return len(self.channels) + 2

    @property
    def num_params(self) -> int:
        """Exact number of trainable parameters."""
        stem = _conv3x3(self.in_channels, self.width) + _norm(self.width)
        blocks = sum(
            self._block(inputs, outputs) for inputs, outputs in pairwise((self.width, *self.channels))
        )
        return stem + blocks + _linear(self.channels[-1], self.classes)

    @staticmethod
    def _block(inputs: int, outputs: int) -> int:
        shortcut = 0 if inputs == outputs else inputs * outputs + _norm(outputs)
        return _conv3x3(inputs, outputs) + _conv3x3(outputs, outputs) + 2 * _norm(outputs) + shortcut


class GPTConfig(Spec):
    """GPT-2 (Radford et al. 2019): pre-LayerNorm, learned positions, biases everywhere, tied embeddings.

    With a `mixture`, experts replace the feed-forward part, as in Switch Transformers and GShard.
    """

    reads: ClassVar[Modality] = "tokens"

    kind: Literal["gpt"] = "gpt"
    layers: Count
    hidden: Count
    heads: Count
    """Attention heads; must divide `hidden`."""
    vocab: Count = 256
    seq: Count = 64
    """Number of tokens in a training sequence; also the maximum length."""
    ffn: Count | None = None
    """Inner width of the feed-forward part; None means `4 * hidden`."""
    mixture: RoutedMixture | None = None
    """Experts in place of the feed-forward part; None for a dense model."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        _require_divides("heads", self.heads, "hidden", self.hidden)
        if self.mixture is not None and self.mixture.dense_layers >= self.layers:
            raise SpecError(
                f"mixture.dense_layers={self.mixture.dense_layers} leaves no layer with experts in "
                f"layers={self.layers}; use 0 to {self.layers - 1}"
            )
        return self

    @property
    def ffn_width(self) -> int:
        """Inner width of the feed-forward part: `ffn`, or its default."""
        return self.ffn or 4 * self.hidden

    @property
    def num_layers_in_order(self) -> int:
        """Number of layers between which a pipeline can split the model: embedding, blocks and head."""
        return self.layers + 2

    @property
    def num_params(self) -> int:
        """Exact number of trainable parameters: ``V h + s h + L (4 h^2 + 2 h f + f + 9 h) + 2 h``.

        V is `vocab`, h is `hidden`, s is `seq`, L is `layers` and f is `ffn_width`. A layer with experts has the
        feed-forward parameters of each expert, and its router's.

        Example:
            >>> MODELS["gpt-124m"].num_params
            124439808
        """
        return self.transformer("").num_params

    def transformer(self, name: str) -> Transformer:
        """Return the same model as a `Transformer` with this name, for layouts and calculators.

        Example:
            >>> MODELS["gpt-124m"].transformer("gpt-124m").num_params
            124439808
        """
        from shardscope.spec.model.transformer import Transformer

        return Transformer(
            name=name, layers=self.layers, hidden=self.hidden, heads=self.heads, ffn=self.ffn_width,
            vocab=self.vocab, seq=self.seq, mixture=None if self.mixture is None else self.mixture.sizes,
        )  # fmt: skip


ModelConfig = MLPConfig | CNNConfig | ResNetConfig | GPTConfig

MODELS: dict[str, ModelConfig] = {
    "mlp": MLPConfig(),
    "cnn": CNNConfig(),
    "resnet": ResNetConfig(),
    "gpt-nano": GPTConfig(layers=4, hidden=64, heads=4),
    "gpt-micro": GPTConfig(layers=4, hidden=128, heads=4),
    "gpt-mini": GPTConfig(layers=4, hidden=256, heads=8, seq=128),
    "gpt-small": GPTConfig(layers=8, hidden=320, heads=8, seq=256),
    "gpt-25m": GPTConfig(layers=8, hidden=512, heads=8, seq=256),
    "gpt-124m": GPTConfig(layers=12, hidden=768, heads=12, vocab=50257, seq=1024),
    "moe-nano": GPTConfig(layers=4, hidden=64, heads=4, mixture=RoutedMixture(experts=8, active=2, ffn=128)),
    "switch-nano": GPTConfig(
        layers=4, hidden=64, heads=4,
        mixture=RoutedMixture(experts=8, active=1, ffn=256, capacity_factor=1.25),
    ),
    "moe-mini": GPTConfig(
        layers=4, hidden=256, heads=8, seq=128,
        mixture=RoutedMixture(experts=16, active=3, ffn=256, shared_ffn=256),
    ),
}  # fmt: skip
"""All models that a job can name; smallest first within each family."""


def transformer_of(model: object) -> Transformer | None:
    """Return the transformer that `MODELS` has under this name; None for other models."""
    config = MODELS.get(model) if isinstance(model, str) else None
    return config.transformer(str(model)) if isinstance(config, GPTConfig) else None


def model_config(name: str) -> ModelConfig:
    """Return the config of the model called `name`.

    Raises:
        SpecError: There is no such model; the message suggests the closest name.
    """
    if name not in MODELS:
        raise unknown_name("model", name, MODELS)
    return MODELS[name]
