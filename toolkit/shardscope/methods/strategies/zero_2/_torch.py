"""ZeRO-2: sharded gradients and optimizer state, by FSDP2 without resharding after the forward pass."""

from __future__ import annotations

from shardscope.training.strategies.fully_sharded import FullySharded


class Zero2Rank(FullySharded):
    """ZeRO-2 strategy: gathers parameters once per step, and reduce-scatters gradients after each micro-batch."""

    keeps_gathered = True
