"""A plan on its cluster: nodes as blocks, devices as squares, coloured by the groups that exchange data."""

from __future__ import annotations

from collections.abc import Sequence
from math import gcd, log
from typing import Any, NamedTuple

import numpy as np
import plotly.graph_objects as go

from shardscope.analytic.communication import group_strides, spanning_link
from shardscope.analytic.communication.ring import is_inside_node
from shardscope.errors import unknown_name
from shardscope.planner import Plans
from shardscope.planner.rules import Ints
from shardscope.spec.cluster import Cluster
from shardscope.spec.layout import Layout
from shardscope.spec.units import bytes_text
from shardscope_widgets.figures import theme

MOST_SQUARES = 512
"""Maximum number of devices drawn as a square each; on larger clusters, a square is one or several whole
nodes.
"""
_COLOURS = ("#5aa9e6", "#f0a43a", "#11997a", "#b866a6", "#d9c36a", "#e06c2c", "#5f6fd6", "#a7abb4")
"""Colours of the groups, used in turn; a number in each square identifies the group."""
_GAPS = (0.5, 1.1)
"""Horizontal and vertical distance between blocks, in squares; the vertical space holds a block's title."""
_WIDEST = 2.6
"""Target ratio of width to height for the arrangement of blocks."""
_WORK = {
    "tensor": "split each layer and exchange activations",
    "context": "split each sequence and exchange keys and values",
    "data": "hold the same part of the model and average its gradients",
    "expert": "hold different experts and exchange tokens",
    "pipeline": "hold successive layers and pass activations on",
}
"""What the ranks of a group do, by axis."""


class MeshGroups(NamedTuple):
    """All groups along one axis of a layout; they have equal sizes."""

    axis: str
    size: int
    stride: int
    """Difference between the numbers of neighbouring ranks in a group."""
    links: tuple[str, str]
    """Link and bandwidth of a rank inside a node and between nodes."""
    is_inside: bool
    """Whether each group is within one node; for the pipeline, whether the whole pipeline is."""

    def of(self, device: Ints) -> Ints:
        """Return the number of each device's group; for the pipeline, its stage."""
        if self.axis == "pipeline":
            return np.asarray(device // self.stride)
        return np.asarray(device // (self.size * self.stride) * self.stride + device % self.stride)

    def members(self, device: int) -> range:
        """Return the devices of a device's group."""
        first = device - device // self.stride % self.size * self.stride
        return range(first, first + self.size * self.stride, self.stride)


class PlanMeshInfo(NamedTuple):
    """Devices of each node, the groups along every axis with more than one rank, and the axis shown by colours."""

    nodes: tuple[int, ...]
    groups: tuple[MeshGroups, ...]
    by: str


def plan_mesh_info(found: Plans, rank: int = 1, *, by: str = "") -> PlanMeshInfo:
    """Return the groups of a plan and the links that they use; the arguments are the same as for `plan_mesh`."""
    return mesh_info(found.asked.cluster, found.ranked(rank), by=by)


def mesh_info(cluster: Cluster, layout: Layout, *, by: str = "") -> PlanMeshInfo:
    """Return the groups of a layout on a cluster, numbered as predictions number them.

    Args:
        cluster: The cluster.
        layout: A layout that uses all its devices.
        by: Axis shown by colours; empty for the first one with more than one rank.
    """
    strides = group_strides(tensor=layout.tensor, context=layout.context, data=layout.data)
    sizes = {
        "tensor": (layout.tensor, strides.tensor),
        "context": (layout.context, strides.context),
        "data": (
            layout.data * layout.context,
            strides.context,
        ),  # gradients are averaged over context ranks, too
        "expert": (layout.expert, strides.context),
        "pipeline": (layout.pipeline, strides.pipeline),
    }
    groups = tuple(
        _groups(cluster, axis, size, int(stride)) for axis, (size, stride) in sizes.items() if size > 1
    )
    if by and by not in sizes:
        raise unknown_name("by", by, sizes)
    shown = by if any(each.axis == by for each in groups) else groups[0].axis if groups else ""
    nodes = tuple(part.per_node for part in cluster.groups or (cluster,) for _ in range(part.nodes))
    return PlanMeshInfo(nodes, groups, shown)


def _groups(cluster: Cluster, axis: str, size: int, stride: int) -> MeshGroups:
    is_piped = axis == "pipeline"  # each rank sends to one other, as `prediction` times it
    is_inside = cluster.num_devices <= cluster.per_node if is_piped else is_inside_node(cluster, size, stride)
    across = cluster.inter.bandwidth if is_piped else float(spanning_link(cluster, size, stride).bandwidth)
    links = (
        f"{cluster.intra.name or 'link'} within a node ({bytes_text(cluster.intra.bandwidth)}/s)",
        f"{cluster.inter.name or 'link'} between nodes ({bytes_text(across)}/s)",
    )
    return MeshGroups(axis, size, stride, links, bool(is_inside))


def plan_mesh_text(info: PlanMeshInfo) -> str:
    """Return a sentence on each kind of group and the link that it uses."""
    if not info.groups:
        return "The whole model is on one device."
    return " ".join(
        f"{_size(each)} communicate over {each.links[not each.is_inside]}." for each in info.groups
    )


def _size(groups: MeshGroups) -> str:
    if groups.axis == "pipeline":
        return f"The {groups.size} pipeline stages"
    return f"{groups.axis.capitalize()} groups of {groups.size}"


class _View(NamedTuple):
    """The drawn blocks and squares: the first device of each square, and the title and number of squares of
    each block.
    """

    per_square: int
    blocks: tuple[tuple[str, int], ...]


def _view(info: PlanMeshInfo) -> _View:
    devices = sum(info.nodes)
    if devices <= MOST_SQUARES:
        return _View(1, tuple((f"node {place}", count) for place, count in enumerate(info.nodes)))
    per_square = gcd(*info.nodes)
    while devices / per_square > MOST_SQUARES:
        per_square *= 2
    squares = -(-devices // per_square)
    stages = next((each.size for each in info.groups if each.axis == "pipeline"), 1)
    if stages == 1 or squares % stages:
        return _View(per_square, (("", squares),))
    return _View(per_square, tuple((f"stage {stage}", squares // stages) for stage in range(stages)))


def mesh(info: PlanMeshInfo) -> dict[str, Any]:
    """Return the devices of a cluster, coloured by their groups along one axis, as Plotly JSON."""
    view = _view(info)
    largest = max(count for _, count in view.blocks)
    width = next(each for each in range(1, largest + 1) if largest % each == 0 and each * each >= largest)
    height = largest // width
    columns = _columns(len(view.blocks), width, height)
    x, y = _edges(columns, width, _GAPS[0]), _edges(-(-len(view.blocks) // columns), height, _GAPS[1])
    rows, across, shapes, titles = [], [], [], []
    for block, (title, count) in enumerate(view.blocks):
        top, left = block // columns * (height + 1), block % columns * (width + 1)
        rows += [top + square // width for square in range(count)]
        across += [left + square % width for square in range(count)]
        shapes.append(_block(x[left], x[left + width], y[top], y[top + height]))
        titles.append(_title(title, x[left], y[top]))
    cells = _cells(info, view, (np.array(rows), np.array(across)), (len(y) - 1, len(x) - 1))
    marks = {"shapes": shapes, "annotations": titles}
    return {"data": [cells | {"x": x, "y": y}], "layout": _layout(x, y) | marks}


def _cells(info: PlanMeshInfo, view: _View, at: tuple[Ints, Ints], shape: tuple[int, int]) -> dict[str, Any]:
    """Return the squares as a trace.

    Args:
        info: What is drawn.
        view: Its squares.
        at: Row and column of each square.
        shape: Number of rows and columns, including gaps.
    """
    first = np.arange(len(at[0])) * view.per_square
    shown = next((each for each in info.groups if each.axis == info.by), None)
    group = np.zeros_like(first) if shown is None else np.unique(shown.of(first), return_inverse=True)[1]

    def table(values: Sequence[Any], blank: Any) -> list[list[Any]]:
        cells = np.full(shape, blank, object)
        cells[at] = values
        return [list(row) for row in cells]

    return {
        "type": "heatmap", "name": plan_mesh_text(info), "z": table((group % len(_COLOURS)).tolist(), None),
        "zmin": -0.5, "zmax": len(_COLOURS) - 0.5, "colorscale": _scale(), "showscale": False,
        "xgap": 1.5, "ygap": 1.5, "hoverongaps": False,
        "text": table([str(each) if shown else "" for each in group], ""), "texttemplate": "%{text}",
        "hovertext": table([_hover(info, view, device) for device in first.tolist()], ""),
        "hovertemplate": "%{hovertext}<extra></extra>", "hoverlabel": {"align": "left"},
    }  # fmt: skip


def _columns(blocks: int, width: int, height: int) -> int:
    """Return the number of blocks per row that gives the arrangement the best proportions."""

    def off(columns: int) -> float:
        rows = -(-blocks // columns)
        across, down = columns * (width + _GAPS[0]), rows * (height + _GAPS[1])
        empty = rows * columns - blocks
        return abs(log(across / down / _WIDEST)) + 4 * empty / blocks

    return min(range(1, blocks + 1), key=off)


def _edges(blocks: int, squares: int, gap: float) -> list[float]:
    """Return the edges of all squares along one direction, with a gap after each block but the last."""
    steps = ([1.0] * squares + [gap]) * blocks
    return [0.0, *np.cumsum(steps[:-1]).tolist()]


def _scale() -> list[list[Any]]:
    parts = len(_COLOURS)
    return [[(place + side) / parts, colour] for place, colour in enumerate(_COLOURS) for side in (0, 1)]


def _hover(info: PlanMeshInfo, view: _View, device: int) -> str:
    last = device + view.per_square - 1
    nodes = dict.fromkeys(_node(info, each) for each in (device, last))
    named = f"device {device}" if view.per_square == 1 else f"devices {device}–{last}"
    place = f"{'nodes' if len(nodes) > 1 else 'node'} {'–'.join(map(str, nodes))}"
    whose = "" if view.per_square == 1 else f"of device {device}: "
    lines = [f"{whose}{_line(info, each, device)}" for each in info.groups]
    return "<br>".join([f"<b>{named}</b>, {place}", *lines])


def _node(info: PlanMeshInfo, device: int) -> int:
    return int(np.searchsorted(np.cumsum(info.nodes), device, side="right"))


def _line(info: PlanMeshInfo, groups: MeshGroups, device: int) -> str:
    """Return a line on one group of a device: the device's rank in it, the other devices, and the link that it uses."""
    members = groups.members(device)
    place = members.index(device)
    if groups.axis == "pipeline":
        if place + 1 == groups.size:
            return f"stage {place} of {groups.size}, the last"
        to = members[place + 1]
        is_near = _node(info, device) == _node(info, to)
        return f"stage {place} of {groups.size}, sends to device {to}: {groups.links[not is_near]}"
    several = (
        f"{members[0]}, {members[1]}, … {members[-1]}" if groups.size > 4 else ", ".join(map(str, members))
    )
    named = f"{members[0]}–{members[-1]}" if groups.stride == 1 else several
    return f"{groups.axis} rank {place} of {groups.size}, with {named}: {groups.links[not groups.is_inside]}"


def _block(left: float, right: float, top: float, bottom: float) -> dict[str, Any]:
    return {
        "type": "rect", "x0": left - 0.12, "x1": right + 0.12, "y0": top - 0.12, "y1": bottom + 0.12,
        "line": {"color": theme.AXIS, "width": 1}, "layer": "below",
    }  # fmt: skip


def _title(text: str, x: float, y: float) -> dict[str, Any]:
    return {
        "text": text, "x": x, "y": y - 0.12, "xanchor": "left", "yanchor": "bottom", "showarrow": False,
        "font": {"size": 10.5, "color": theme.GREY},
    }  # fmt: skip


def _layout(x: Sequence[float], y: Sequence[float]) -> dict[str, Any]:
    bare = {"visible": False, "fixedrange": True, "constrain": "domain"}
    square = min(34.0, 520 / x[-1])
    return theme.look(
        height=round(square * (y[-1] + 1.4)) + 16,
        margin={"l": 4, "r": 4, "t": 4, "b": 4},
        xaxis=bare | {"constraintoward": "left", "range": [-0.2, x[-1] + 0.2]},
        yaxis=bare | {"constraintoward": "top", "range": [y[-1] + 0.2, -0.9], "scaleanchor": "x"},
    )


def mesh_key(info: PlanMeshInfo) -> str:
    """Return a sentence on the meaning of a square, its colour and its number."""
    per_square = _view(info).per_square
    nodes = per_square // max(info.nodes)
    square = "device" if per_square == 1 else "node" if nodes <= 1 else f"group of {nodes} nodes"
    if not info.by:
        return f"A square is a {square}."
    groups = "stage" if info.by == "pipeline" else f"{info.by} group"
    same = (
        f"squares with the same number are in the same {groups}"
        if per_square == 1
        else f"squares with the same number are in the same {groups}s"
    )
    return f"A square is a {square}; {same}. Ranks of a {info.by} group {_WORK[info.by]}."


def plan_mesh(found: Plans, rank: int = 1, *, by: str = "") -> go.Figure:
    """Draw the devices of a plan, with the groups that exchange data and, on hover, the links that they use.

    Args:
        found: Result of the search.
        rank: Position of the plan in the ranking, from 1.
        by: Axis whose groups are shown by colours: ``tensor``, ``context``, ``data``, ``expert`` or
            ``pipeline``; empty for the first one with more than one rank.
    """
    return go.Figure(mesh(plan_mesh_info(found, rank, by=by)))
