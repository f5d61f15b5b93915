"""ZeRO-3: parameters, gradients and optimizer state in shards, by FSDP2 with resharding after the forward pass."""

from __future__ import annotations

from shardscope.training.strategies.fully_sharded import FullySharded


class Zero3(FullySharded):
    """Gathers each block's parameters for its forward pass, and again for its backward pass."""

    keeps_gathered = False
