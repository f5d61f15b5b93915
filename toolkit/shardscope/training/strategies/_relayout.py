"""Converts compressor state (residuals) between FSDP2's layout for any number of ranks and a layout by parameter.

FSDP2 stores the gradient of a sharding unit as one flat tensor, the concatenation of one chunk per rank. With W ranks,
the chunk of rank r contains the rows [r k, (r+1) k) of each parameter in the unit, where k is the parameter's number of
rows divided by W and rounded up. With one rank, the parameters follow one another.

The keys of compressor state are ``kind.unit`` if a strategy shards units, and ``kind.parameter`` otherwise; `kind` is
the kind of residual (see `Memory.kept`).
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Mapping, Sequence
from itertools import groupby

import torch
from torch import Tensor, nn

from shardscope.training.models import units_of

ROOT = "model"
"""Name of the root unit, which has the parameters that belong to no other unit."""
SHARDS = "shards of "
"""Text that precedes the number of shards in the name of a layout."""
LEFT = "without "
"""Text that, in the name of a layout, precedes a JSON list of blocks whose parameters belong to the root unit because
they are read outside the block."""
Units = Mapping[str, Mapping[str, torch.Size]]
"""Mapping from each unit's name to the shapes of its trained parameters, by parameter name and in order."""


def shards_of(layout: str) -> int | None:
    """Return the number of shards in the layout of this name; None if its units are not sharded."""
    _, is_sharded, count = layout.rpartition(SHARDS)
    return int(count) if is_sharded else None


def root_blocks(layout: str) -> list[str]:
    """Return the blocks whose parameters belong to the root unit in the layout of this name."""
    head, _, _ = layout.rpartition(SHARDS)
    _, _, names = head.partition(LEFT)
    return list(json.loads(names)) if names else []


def can_be_cut(shape: torch.Size) -> bool:
    """Return whether FSDP2 shards a parameter of this shape, which is true unless it is a scalar or empty."""
    return len(shape) > 0 and shape.numel() > 0


def units_with_parameters(
    model: nn.Module, *, besides: Collection[str] = ()
) -> dict[str, dict[str, torch.Size]]:
    """Return the sharding units of `model`, each with the shapes of its trained parameters that FSDP2 shards.

    A parameter in nested units is listed in the innermost one only.

    Args:
        model: The model, sharded or not.
        besides: Names of blocks whose parameters belong to the root unit.
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
    """Convert state that is stored by unit, in the layout for `ranks` ranks, to flat tensors by parameter."""
    found: dict[str, Tensor] = {}
    for key, flat in state.items():
        kind, _, unit = key.partition(".")
        shapes = list(units[unit].values())
        wholes = relayout(flat, shapes, ranks, 1).split([shape.numel() for shape in shapes])
        found |= {f"{kind}.{name}": whole for name, whole in zip(units[unit], wholes, strict=True)}
    return found


def by_unit(state: Mapping[str, Tensor], units: Units, ranks: int) -> dict[str, Tensor]:
    """Convert state stored by parameter to the layout by unit for `ranks` ranks; missing parameters become zeros."""
    return {
        f"{kind}.{unit}": relayout(_joined(state, kind, shapes), list(shapes.values()), 1, ranks)
        for kind in _kinds(state)
        for unit, shapes in units.items()
        if any(f"{kind}.{name}" in state for name in shapes)
    }


def _kinds(keys: Iterable[str]) -> list[str]:
    return [kind for kind, _ in groupby(sorted(keys), key=lambda key: key.partition(".")[0])]


def _joined(state: Mapping[str, Tensor], kind: str, shapes: Mapping[str, torch.Size]) -> Tensor:
    """Return the state of a unit's parameters, concatenated into one flat tensor."""
    none = {name: torch.zeros(shape.numel()) for name, shape in shapes.items()}
    return torch.cat([state.get(f"{kind}.{name}", none[name]).view(-1) for name in shapes])


def relayout(flat: Tensor, shapes: Sequence[torch.Size], old: int, new: int) -> Tensor:
    """Convert `flat` from its layout for `old` ranks to the layout for `new` ranks; padding is zero.

    Args:
        flat: One-dimensional tensor: the chunks of all ranks, concatenated.
        shapes: Shapes of the unit's parameters, in order; none is a scalar.
        old: Number of ranks in the layout of `flat`.
        new: Number of ranks in the layout of the result.
    """
    wholes, table, column = [], flat.view(old, -1), 0
    for shape in shapes:
        width = _chunk(shape, old)
        wholes.append(table[:, column : column + width].reshape(-1)[: shape.numel()])
        column += width
    return torch.cat([_padded(whole, _chunk(shape, new) * new).view(new, -1)
                      for whole, shape in zip(wholes, shapes, strict=True)], dim=1).view(-1)  # fmt: skip


def _chunk(shape: torch.Size, ranks: int) -> int:
    """Return the number of elements of a parameter in one rank's chunk, including padding."""
    return -(-shape[0] // ranks) * shape[1:].numel()


def _padded(whole: Tensor, size: int) -> Tensor:
    return torch.nn.functional.pad(whole, (0, size - whole.numel()))
