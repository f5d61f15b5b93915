"""The modules behind the models that a job can name.

`build_model` turns a name, a config or the user's own callable into a module. Weights come from torch's
global random generator, so ranks that set the same seed start from the same parameters. `blocks` lists the
parts that recomputation uses, `units_of` those that a sharded strategy gathers one at a time.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from shardscope.errors import SpecError
from shardscope.spec.models import CNNConfig, GPTConfig, MLPConfig, ModelConfig, ResNetConfig, model_config
from shardscope.training.models._blocks import CheapToRecompute, ForwardPart, blocks, units_of
from shardscope.training.models.cnn import CNN
from shardscope.training.models.gpt import GPT
from shardscope.training.models.mlp import MLP
from shardscope.training.models.resnet import ResNet

__all__ = [
    "CNN",
    "GPT",
    "MLP",
    "CheapToRecompute",
    "ForwardPart",
    "ResNet",
    "blocks",
    "build_model",
    "units_of",
]


def build_model(
    model: str | ModelConfig | Callable[[], nn.Module], *, dtype: torch.dtype | None = None
) -> nn.Module:
    """Build a module from a catalogue name, a config or a callable that returns one.

    The weights are drawn in float32 and then cast, so that all precisions start from the same values.

    Args:
        model: What to build.
        dtype: Type of the parameters; None does not change it.

    Raises:
        SpecError: No model has this name, or the callable did not return a module.

    Example:
        >>> build_model("gpt-nano")(torch.zeros(2, 64, dtype=torch.int64)).shape
        torch.Size([2, 64, 256])
    """
    module = _module(model_config(model) if isinstance(model, str) else model)
    return module if dtype is None else module.to(dtype)


def _module(model: ModelConfig | Callable[[], nn.Module]) -> nn.Module:
    match model:
        case MLPConfig():
            return MLP(model)
        case CNNConfig():
            return CNN(model)
        case ResNetConfig():
            return ResNet(model)
        case GPTConfig():
            return GPT(model)
    return _called(model)


def _called(make_model: Callable[[], nn.Module]) -> nn.Module:
    module = make_model()
    if not isinstance(module, nn.Module):
        kind = type(module).__name__
        raise SpecError(f"model={make_model!r} returned {kind}; return a torch.nn.Module")
    return module
