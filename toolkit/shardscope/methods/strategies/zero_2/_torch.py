"""ZeRO-2: gradients and optimizer state in shards, by FSDP2 without resharding after the forward pass."""

from __future__ import annotations

from shardscope.training.strategies.fully_sharded import FullySharded


class Zero2(FullySharded):
    """Gathers parameters once a step, however many micro-batches it has; reduce-scatters gradients after each."""

    keeps_gathered = True
