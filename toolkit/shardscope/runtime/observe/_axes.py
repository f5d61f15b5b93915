"""Axes of an observed training loop besides data parallelism, as far as the model's own tensors show them."""

from __future__ import annotations

import sys
from math import prod
from typing import Any

from torch import nn

from shardscope.training._compat import fsdp_units


def is_hybrid(model: nn.Module, world_size: int) -> bool:
    """Return whether ranks divide the model along other axes than FSDP2's, such as that of `parallelize_module`."""
    units = fsdp_units(model)
    outside = bool(units) and units[0].num_shards * units[0].num_replicas != world_size
    return outside or tensor_axis(model)[0] > 1


def tensor_axis(model: nn.Module) -> tuple[int, int]:
    """Return the number of ranks that compute with the same samples as this one, and this rank's place among them.

    These are the ranks along the dimensions of DTensors that follow those of FSDP2, which are first in a mesh.
    """
    kind: Any = getattr(
        sys.modules.get("torch.distributed.tensor"), "DTensor", ()
    )  # imported if there are any
    units = fsdp_units(model)
    of_data = 0 if not units else 1 + (units[0].num_replicas > 1)
    for parameter in model.parameters():
        if not isinstance(parameter, kind):
            continue
        mesh = parameter.device_mesh
        sizes, place = tuple(mesh.shape)[of_data:], mesh.get_coordinate()
        if prod(sizes) > 1 and place is not None:
            rank = 0
            for size, index in zip(sizes, place[of_data:], strict=True):
                rank = rank * size + index
            return prod(sizes), rank
    return 1, 0
