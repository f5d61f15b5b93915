"""ZeRO-3: sharded parameters, gradients and optimizer state, by FSDP2 with resharding after the forward pass."""

from __future__ import annotations

from shardscope.training.strategies.fully_sharded import FullySharded


class Zero3Rank(FullySharded):
    """ZeRO-3 strategy: gathers each block's parameters for its forward pass, and again for its backward pass."""

    keeps_gathered = False
