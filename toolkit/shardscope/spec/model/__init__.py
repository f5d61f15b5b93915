"""Models too large to run, as descriptions: transformers by their sizes, anything else by its table of layers."""

from shardscope.spec.model.base import Model
from shardscope.spec.model.table import Layer, LayerTable
from shardscope.spec.model.transformer import LatentAttention, Mixture, Transformer

__all__ = ["LatentAttention", "Layer", "LayerTable", "Mixture", "Model", "Transformer"]
