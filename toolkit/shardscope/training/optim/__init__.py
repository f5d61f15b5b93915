"""Shared parts of optimizers: the parameters they update, layer-wise trust ratios, a frozen second moment."""

from __future__ import annotations

from shardscope.training.optim._layerwise import LayerwiseOptimizer
from shardscope.training.optim.parameters import TrainedParameters, built_by
from shardscope.training.optim.signals import LayerSignal

__all__ = ["LayerSignal", "LayerwiseOptimizer", "TrainedParameters", "built_by"]
