"""What compressors remember, in checkpoints: saved by each rank under its own name, found again by it.

On another number of ranks, or under another strategy, there is no such rank. Then every rank goes on with what all the
old ones owed in the mean, so that their mean, which is what the next gradient is short of, stays the same.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor

from shardscope.training.strategies.base import Strategy

_KEY = re.compile(r"compression-(\d+)\.(.+)")


def remembered(strategy: Strategy) -> dict[str, Any]:
    """This rank's part of a checkpoint; nothing where gradients are not compressed."""
    return {} if strategy.compressor is None else {_name(strategy.context.rank): strategy.remembered()}


def recall(strategy: Strategy, path: Path, saved_layout: str | None) -> str:
    """Give the compressor what the checkpoint at `path` has for it; called by all ranks.

    Returns:
        What it was: ``"nothing"``, ``"its own"``, or ``"the mean"`` over the ranks that saved it.
    """
    saved = _saved(path)
    if strategy.compressor is None or not saved:
        return "nothing"
    if saved_layout == strategy.layout:
        rank = strategy.context.rank
        strategy.recall(_filled(strategy, path, rank, saved.get(rank, {})))
        return "its own"

    def states() -> Iterator[dict[str, Tensor]]:
        for rank in sorted(saved):
            yield _filled(strategy, path, rank, saved[rank])

    strategy.recall(strategy.recut(strategy.compressor.merge(states()), saved_layout or ""))
    return "the mean"


def _name(rank: int) -> str:
    return f"compression-{rank}"


def _saved(path: Path) -> dict[int, dict[str, Tensor]]:
    """Room for what each rank has saved, by rank and name: it is made lazily, so only the checkpoint knows."""
    saved: dict[int, dict[str, Tensor]] = {}
    for key, stored in dcp.FileSystemReader(path).read_metadata().state_dict_metadata.items():
        found = _KEY.fullmatch(key)
        if found is not None and isinstance(stored, dcp.metadata.TensorStorageMetadata):
            room = torch.empty(stored.size, dtype=stored.properties.dtype)
            saved.setdefault(int(found[1]), {})[found[2]] = room
    return saved


def _filled(strategy: Strategy, path: Path, rank: int, room: dict[str, Tensor]) -> dict[str, Tensor]:
    dcp.load({_name(rank): room}, checkpoint_id=path, no_dist=strategy.context.world_size == 1)
    return room
