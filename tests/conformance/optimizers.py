"""Optimizers as tests build them: a spec over named parameters."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from shardscope.spec import Optimizer
from shardscope.training.optim import TrainedParameters, built_by


def build_optimizer(
    spec: Optimizer, named: Iterable[tuple[str, nn.Parameter]], **about: Any
) -> torch.optim.Optimizer:
    """The optimizer over parameters that `about` says the rest of, as of `TrainedParameters`."""
    return built_by(spec, TrainedParameters(named, **about))
