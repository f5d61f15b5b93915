"""The models of the catalogue as PyTorch modules, and functions that divide a model into parts.

`build_model` builds a module from a name, a config or a user's callable, or copies a user's module. New weights are
drawn from PyTorch's global random generator, so ranks that set the same seed start with the same parameters. `blocks`
lists the parts of a model that can be recomputed separately, and `units_of` the sharding units, which a sharded
strategy gathers one at a time.
"""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy

import torch
from torch import nn

from shardscope.errors import SpecError
from shardscope.spec.models import CNNConfig, GPTConfig, MLPConfig, ModelConfig, ResNetConfig, model_config
from shardscope.training.models._blocks import CheapToRecompute, ForwardPart, blocks, units_of
from shardscope.training.models.cnn import CNN
from shardscope.training.models.gpt import GPT
from shardscope.training.models.mixture import MixtureGPT
from shardscope.training.models.mlp import MLP
from shardscope.training.models.resnet import ResNet

__all__ = [
    "CNN",
    "GPT",
    "MLP",
    "CheapToRecompute",
    "ForwardPart",
    "MixtureGPT",
    "ResNet",
    "blocks",
    "build_model",
    "units_of",
]


def build_model(
    model: str | ModelConfig | Callable[[], nn.Module] | nn.Module, *, dtype: torch.dtype | None = None
) -> nn.Module:
    """Build a module from a catalogue name, a config or a callable that returns one; copy a module.

    The weights are drawn in float32 and then cast, so that all precisions start from the same values.

    Args:
        model: The name, config or callable, or the module to copy.
        dtype: Dtype of the parameters; None leaves it unchanged.

    Raises:
        SpecError: No model has this name, or the callable did not return a module.

    Example:
        >>> build_model("gpt-nano")(torch.zeros(2, 64, dtype=torch.int64)).shape
        torch.Size([2, 64, 256])
    """
    module = _module(model_config(model) if isinstance(model, str) else model)
    return module if dtype is None else module.to(dtype)


def _module(model: ModelConfig | Callable[[], nn.Module] | nn.Module) -> nn.Module:
    match model:
        case nn.Module():
            return deepcopy(model)
        case MLPConfig():
            return MLP(model)
        case CNNConfig():
            return CNN(model)
        case ResNetConfig():
            return ResNet(model)
        case GPTConfig():
            return GPT(model) if model.mixture is None else MixtureGPT(model)
    return _called(model)


def _called(make_model: Callable[[], nn.Module]) -> nn.Module:
    module = make_model()
    if not isinstance(module, nn.Module):
        kind = type(module).__name__
        raise SpecError(f"model={make_model!r} returned {kind}; return a torch.nn.Module")
    return module
