"""The ranks of a job as a mesh of several axes, each with its own metered groups.

Along an axis, ranks differ in their index on this axis only; each such line of ranks is a group. The last axis has
neighbouring ranks, which an emulated cluster places in one node.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from datetime import timedelta
from math import prod
from typing import cast
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from shardscope.runlog.axes import axis_groups
from shardscope.training.axis_meter import AxisMeter
from shardscope.training.collectives.process_group import MeteredProcessGroup
from shardscope.training.context import RankContext
from shardscope.training.meter import Meter

_opened: WeakKeyDictionary[dist.ProcessGroup, dict[tuple[tuple[str, int], ...], RankMesh]] = (
    WeakKeyDictionary()
)
"""The meshes of this process, by the group of all ranks and by shape."""

_replica_meshes: WeakKeyDictionary[dist.ProcessGroup, dict[int, DeviceMesh]] = WeakKeyDictionary()
"""The meshes of `replica_mesh`, by the group of its ranks and by the number of groups."""
_REPLICAS = ("replica", "shard")


class RankMesh:
    """The axes of a job's ranks, as one rank sees them; made by `open`.

    Args:
        groups: The rank's group on each axis; None on an axis of one rank.
    """

    def __init__(self, groups: Mapping[str, MeteredProcessGroup | None]) -> None:
        self._groups = groups

    @classmethod
    def open(
        cls, shape: Mapping[str, int], context: RankContext, *, timeout_s: float, axes: Collection[str] = ()
    ) -> RankMesh:
        """Create the groups of every axis with more than one rank; called by all ranks, in the same order.

        Args:
            shape: Number of ranks along each axis, the outermost axis first.
            context: This rank's context, of all ranks.
            timeout_s: How long a rank waits for the others, in seconds.
            axes: The axes that need groups; empty for all.
        """
        assert prod(shape.values()) == context.world_size
        if context.group is None:
            return cls(dict.fromkeys(shape))
        known = _opened.setdefault(context.group, {})
        key = tuple(shape.items())
        if key not in known:
            known[key] = cls({axis: _group(shape, axis, context, timeout_s) for axis in axes or shape})
        return known[key]

    def context(self, context: RankContext, axis: str) -> RankContext:
        """Return the context of the rank's group on an axis, for the context of all ranks."""
        return context.on_axis(axis, self._groups[axis])


def replica_mesh(context: RankContext, num_groups: int, *, timeout_s: float) -> DeviceMesh:
    """Return ranks as a mesh with dimensions ``replica`` and ``shard``, for HSDP; called by all of them.

    Args:
        context: This rank's context, of an axis or of all ranks.
        num_groups: Number of replicas; the ranks of each are neighbours, over which it is sharded.
        timeout_s: How long a rank waits for the others, in seconds.
    """
    assert context.group is not None
    known = _replica_meshes.setdefault(context.group, {})
    if num_groups not in known:
        rows = torch.tensor(dist.get_process_group_ranks(context.group)).view(num_groups, -1)
        known[num_groups] = (
            init_device_mesh(context.device.type, tuple(rows.shape), mesh_dim_names=_REPLICAS)
            if context.axis is None
            else _of_axis(rows, context, timeout_s)
        )
    return known[num_groups]


def _of_axis(rows: torch.Tensor, context: RankContext, timeout_s: float) -> DeviceMesh:
    """Return the ranks of an axis, a replica in each row, as a mesh."""
    place, within = divmod(context.rank, rows.shape[1])
    lines = rows[:, within].tolist(), rows[place].tolist()
    groups = [_metered(line, context, timeout_s) for line in lines]
    return DeviceMesh.from_group(groups, context.device.type, mesh=rows, mesh_dim_names=_REPLICAS)


def _metered(line: list[int], context: RankContext, timeout_s: float) -> dist.ProcessGroup:
    """Create a group of ranks of an axis, which no other ranks need to know, and record what it sends as the axis's."""
    timeout = timedelta(seconds=timeout_s)
    group = dist.new_group(line, timeout=timeout, use_local_synchronization=True)
    assert isinstance(group, MeteredProcessGroup)
    assert context.axis is not None
    group.meter = cast("Meter", AxisMeter(context.whole.meter, context.axis, line))
    return group


def _group(
    shape: Mapping[str, int], axis: str, context: RankContext, timeout_s: float
) -> MeteredProcessGroup | None:
    """Create the groups along an axis, and return that of this rank; None if the axis has one rank."""
    lines = axis_groups(shape, axis)
    if len(lines[0]) == 1:
        return None
    own = None
    for line in lines:
        group = dist.new_group(line, timeout=timedelta(seconds=timeout_s))
        if context.rank in line:
            assert isinstance(group, MeteredProcessGroup)
            group.meter = cast("Meter", AxisMeter(context.meter, axis, line))
            own = group
    return own
