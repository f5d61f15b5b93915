"""Optimizers: `build_optimizer` makes what a job's spec asks for."""

from __future__ import annotations

from shardscope.training.optim._layerwise import LayerwiseOptimizer
from shardscope.training.optim.build import build_optimizer
from shardscope.training.optim.lamb import Lamb
from shardscope.training.optim.lars import Lars
from shardscope.training.optim.signals import LayerSignal

__all__ = ["Lamb", "Lars", "LayerSignal", "LayerwiseOptimizer", "build_optimizer"]
