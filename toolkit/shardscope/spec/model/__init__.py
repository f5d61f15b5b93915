"""Descriptions of models too large to run: transformers by their sizes, any other model by its table of layers."""

from shardscope.spec.mixture import Mixture
from shardscope.spec.model.base import Model
from shardscope.spec.model.table import LayerRow, LayerTable
from shardscope.spec.model.transformer import LatentAttention, Transformer

__all__ = ["LatentAttention", "LayerRow", "LayerTable", "Mixture", "Model", "Transformer"]
