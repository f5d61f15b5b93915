"""Shares of the ranks in what ZeRO shards, as the ranks find them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import nn

from shardscope.machine import usable_memory_bytes
from shardscope.methods.strategies.flat_shards import FlatShards
from shardscope.methods.strategies.zero_1._torch_flat import Named
from shardscope.spec.shares import shares_by_memory
from shardscope.training.context import RankContext


def shares_of_ranks(
    settings: FlatShards, model: nn.Module, buckets: Sequence[Sequence[Named]], context: RankContext
) -> tuple[int, ...] | None:
    """Return the share of each rank, the same on all ranks, which must all call this; None for equal shares.

    Args:
        settings: The strategy.
        model: The model.
        buckets: Its trained parameters, by bucket.
        context: This rank's context.

    Raises:
        SpecError: The memory of a rank has no room for optimizer state, or the emulated cluster does not state it.
    """
    if not isinstance(settings.shards, str):
        return settings.shards
    weights = sum(p.nbytes for p in model.parameters())
    whole = settings.whole_bytes(weights, [sum(p.nbytes for _, p in named) for named in buckets])
    memory = torch.zeros(context.world_size, dtype=torch.float64, device=context.device)
    memory[context.rank] = _own_memory_bytes(context)
    dist.all_reduce(memory)
    return shares_by_memory(memory.tolist(), whole)


def _own_memory_bytes(context: RankContext) -> float:
    """Return the bytes of memory of this rank's device, divided by the ranks that share it."""
    if context.emulation is not None:
        return context.emulation.cluster.stated_memory()[context.rank]
    here = context.local_world_size or context.world_size
    if context.device.type == "cuda":
        each_gpu = -(-here // torch.cuda.device_count())
        return float(torch.cuda.get_device_properties(context.device).total_memory) / each_gpu
    return usable_memory_bytes() / here
