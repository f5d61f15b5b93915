"""Shared parts of optimizers: their parameter groups, layer-wise trust ratios, and freezing of the second moment."""

from __future__ import annotations

from shardscope.training.optim._layerwise import LayerwiseOptimizer
from shardscope.training.optim.parameters import TrainedParameters, built_by
from shardscope.training.optim.signals import LayerSignal

__all__ = ["LayerSignal", "LayerwiseOptimizer", "TrainedParameters", "built_by"]
