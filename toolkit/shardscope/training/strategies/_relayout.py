"""A flat gradient as FSDP2 lays it out for one number of ranks, for another number, and parameter by parameter.

Rank r's chunk holds rows [r k, (r+1) k) of every parameter of the unit, k being a W-th of its rows, rounded up. On one
rank that is one parameter after another.

What compressors remember goes by ``kind.unit`` where units are sharded, and by ``kind.parameter`` everywhere else.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Mapping, Sequence
from itertools import groupby

import torch
from torch import Tensor, nn

from shardscope.training.models import units_of

ROOT = "model"
"""The unit of what no block holds alone."""
SHARDS = "shards of "
"""In the name of a layout, before the number of shards."""
LEFT = "without "
"""Before the blocks, as JSON, that are not units because their parameters are read outside them."""
Units = Mapping[str, Mapping[str, torch.Size]]
"""Of each unit, the shapes of its trained parameters by name, in their order."""


def shards_of(layout: str) -> int | None:
    """How many a layout is for; None where it is not one of shards."""
    _, is_sharded, count = layout.rpartition(SHARDS)
    return int(count) if is_sharded else None


def left_of(layout: str) -> list[str]:
    """The blocks that a layout leaves to the model around them."""
    head, _, _ = layout.rpartition(SHARDS)
    _, _, names = head.partition(LEFT)
    return list(json.loads(names)) if names else []


def can_be_cut(shape: torch.Size) -> bool:
    """Whether FSDP2 shards a parameter of this shape: it has rows, and elements in them."""
    return len(shape) > 0 and shape.numel() > 0


def units_with_parameters(
    model: nn.Module, *, besides: Collection[str] = ()
) -> dict[str, dict[str, torch.Size]]:
    """The units that `model` is sharded in, or would be; each parameter that can be cut is in the innermost with it.

    Args:
        model: Whole or sharded.
        besides: Blocks, by name, that are left to the model around them.
    """
    whole = {id(unit) for unit in units_of(model, besides=besides)}
    named = {
        name or ROOT: module for name, module in model.named_modules() if not name or id(module) in whole
    }
    owner = {id(parameter): name for name, module in named.items() for parameter in module.parameters()}
    found: dict[str, dict[str, torch.Size]] = {name: {} for name in named}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad and can_be_cut(parameter.shape):
            found[owner[id(parameter)]][name] = parameter.shape
    return found


def by_parameter(state: Mapping[str, Tensor], units: Units, ranks: int) -> dict[str, Tensor]:
    """What lies by unit, for `ranks` ranks, by parameter; flat."""
    found: dict[str, Tensor] = {}
    for key, flat in state.items():
        kind, _, unit = key.partition(".")
        shapes = list(units[unit].values())
        wholes = relayout(flat, shapes, ranks, 1).split([shape.numel() for shape in shapes])
        found |= {f"{kind}.{name}": whole for name, whole in zip(units[unit], wholes, strict=True)}
    return found


def by_unit(state: Mapping[str, Tensor], units: Units, ranks: int) -> dict[str, Tensor]:
    """What lies by parameter, by unit for `ranks` ranks; where a parameter has nothing, zeros."""
    return {
        f"{kind}.{unit}": relayout(_joined(state, kind, shapes), list(shapes.values()), 1, ranks)
        for kind in _kinds(state)
        for unit, shapes in units.items()
        if any(f"{kind}.{name}" in state for name in shapes)
    }


def _kinds(keys: Iterable[str]) -> list[str]:
    return [kind for kind, _ in groupby(sorted(keys), key=lambda key: key.partition(".")[0])]


def _joined(state: Mapping[str, Tensor], kind: str, shapes: Mapping[str, torch.Size]) -> Tensor:
    """The parameters of a unit, one after another."""
    none = {name: torch.zeros(shape.numel()) for name, shape in shapes.items()}
    return torch.cat([state.get(f"{kind}.{name}", none[name]).view(-1) for name in shapes])


def relayout(flat: Tensor, shapes: Sequence[torch.Size], old: int, new: int) -> Tensor:
    """What lies in `flat` for `old` ranks as it lies for `new` ones; padding is zero.

    Args:
        flat: One-dimensional; all chunks one after another.
        shapes: Of the unit's parameters, in their order; none is a scalar.
        old: Ranks that `flat` is laid out for.
        new: Ranks to lay it out for.
    """
    wholes, table, column = [], flat.view(old, -1), 0
    for shape in shapes:
        width = _chunk(shape, old)
        wholes.append(table[:, column : column + width].reshape(-1)[: shape.numel()])
        column += width
    return torch.cat([_padded(whole, _chunk(shape, new) * new).view(new, -1)
                      for whole, shape in zip(wholes, shapes, strict=True)], dim=1).view(-1)  # fmt: skip


def _chunk(shape: torch.Size, ranks: int) -> int:
    """Elements of a parameter in one rank's chunk, padding included."""
    return -(-shape[0] // ranks) * shape[1:].numel()


def _padded(whole: Tensor, size: int) -> Tensor:
    return torch.nn.functional.pad(whole, (0, size - whole.numel()))
