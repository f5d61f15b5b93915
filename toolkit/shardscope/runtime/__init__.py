"""Launch, watch, stop and find runs. This package does not import torch; only the processes that it starts do."""

from shardscope._lazy import attach

__getattr__, __dir__, __all__ = attach(__name__, __file__)
