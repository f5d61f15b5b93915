"""Conversion of a flat gradient between FSDP2's layouts for different numbers of ranks, and to one per parameter.

Rank r's chunk holds rows [r k, (r+1) k) of every parameter of the unit, where k is a W-th of its rows, rounded up. On
one rank, that is one parameter after another.

Compressor state has keys ``kind.unit`` where units are sharded, and ``kind.parameter`` everywhere else.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Mapping, Sequence
from itertools import groupby

import torch
from torch import Tensor, nn

from shardscope.training.models import units_of

ROOT = "model"
"""Name of the root unit, which holds the parameters that no block holds alone."""
SHARDS = "shards of "
"""Text in the name of a layout before the number of shards."""
LEFT = "without "
"""Text before the JSON list of blocks that are not units because their parameters are read outside them."""
Units = Mapping[str, Mapping[str, torch.Size]]
"""Shapes of each unit's trained parameters by name, in their order."""


def shards_of(layout: str) -> int | None:
    """Number of shards of a layout; None if it is not a sharded layout."""
    _, is_sharded, count = layout.rpartition(SHARDS)
    return int(count) if is_sharded else None


def left_of(layout: str) -> list[str]:
    """Blocks whose parameters a layout leaves to the root unit."""
    head, _, _ = layout.rpartition(SHARDS)
    _, _, names = head.partition(LEFT)
    return list(json.loads(names)) if names else []


def can_be_cut(shape: torch.Size) -> bool:
    """Whether FSDP2 shards a parameter of this shape: it has rows, and the rows have elements."""
    return len(shape) > 0 and shape.numel() > 0


def units_with_parameters(
    model: nn.Module, *, besides: Collection[str] = ()
) -> dict[str, dict[str, torch.Size]]:
    """Units that `model` is or would be sharded in, each parameter that can be cut in its innermost unit.

    Args:
        model: Whole or sharded.
        besides: Names of blocks that are left to the root unit.
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
    """Convert state by unit, laid out for `ranks` ranks, to flat state by parameter."""
    found: dict[str, Tensor] = {}
    for key, flat in state.items():
        kind, _, unit = key.partition(".")
        shapes = list(units[unit].values())
        wholes = relayout(flat, shapes, ranks, 1).split([shape.numel() for shape in shapes])
        found |= {f"{kind}.{name}": whole for name, whole in zip(units[unit], wholes, strict=True)}
    return found


def by_unit(state: Mapping[str, Tensor], units: Units, ranks: int) -> dict[str, Tensor]:
    """Convert state by parameter to state by unit for `ranks` ranks; a missing parameter becomes zeros."""
    return {
        f"{kind}.{unit}": relayout(_joined(state, kind, shapes), list(shapes.values()), 1, ranks)
        for kind in _kinds(state)
        for unit, shapes in units.items()
        if any(f"{kind}.{name}" in state for name in shapes)
    }


def _kinds(keys: Iterable[str]) -> list[str]:
    return [kind for kind, _ in groupby(sorted(keys), key=lambda key: key.partition(".")[0])]


def _joined(state: Mapping[str, Tensor], kind: str, shapes: Mapping[str, torch.Size]) -> Tensor:
    """State of a unit's parameters, flat and concatenated."""
    none = {name: torch.zeros(shape.numel()) for name, shape in shapes.items()}
    return torch.cat([state.get(f"{kind}.{name}", none[name]).view(-1) for name in shapes])


def relayout(flat: Tensor, shapes: Sequence[torch.Size], old: int, new: int) -> Tensor:
    """Convert `flat` from its layout for `old` ranks to the layout for `new` ranks; padding is zero.

    Args:
        flat: One-dimensional; all chunks concatenated.
        shapes: Shapes of the unit's parameters, in their order; none is a scalar.
        old: Number of ranks that `flat` is laid out for.
        new: Number of ranks to lay it out for.
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
