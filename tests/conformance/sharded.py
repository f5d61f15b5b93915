"""What tests of sharded strategies share: a model that is awkward to cut, and what of it travels together."""

from __future__ import annotations

from torch import nn

from shardscope.training.trainer import Trainer


def jagged() -> nn.Module:
    """Rows that no number of ranks divides, and fewer rows than ranks."""
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 17), nn.ReLU(), nn.Linear(17, 3), nn.Linear(3, 10))


def units(trainer: Trainer) -> list[list[tuple[int, ...]]]:
    """Shapes of the parameters of each module that communicates by itself."""
    fsdp = [set(map(id, unit.parameters())) for unit in trainer.strategy.units]
    found: list[list[tuple[int, ...]]] = [[] for _ in fsdp]
    for parameter in trainer.model.parameters():
        owner = max(i for i, ids in enumerate(fsdp) if id(parameter) in ids)  # the innermost comes last
        found[owner].append(tuple(parameter.shape))
    return [shapes for shapes in found if shapes]
