"""The ranks of a mesh as cards in a grid: what each holds of which layer, and what it sends along each axis."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from math import prod
from statistics import median
from typing import TYPE_CHECKING, Any, NamedTuple

import plotly.graph_objects as go

from shardscope.prediction.axis_waits import bubble_s
from shardscope.runlog.axes import axis_groups, axis_of
from shardscope.runlog.schema import MEMORY_KINDS
from shardscope.runlog.spans import covered
from shardscope.runlog.step_events import MESSAGE
from shardscope_widgets.figures import theme
from shardscope_widgets.words import bytes_text, count_text, duration_text, listed

if TYPE_CHECKING:
    from shardscope.prediction.job import JobPrediction
    from shardscope.runlog.step_events import StepEvents
    from shardscope.spec import Job

MOST_CARDS = 16
"""Maximum number of ranks that are drawn as cards."""
_GAPS, _BLOCK = (0.46, 0.36), 0.3
"""Distances as fractions of a card: between two cards, and in addition between groups along the outermost axis."""
_LAYERS, _MEMORY = (0.17, 0.68), (0.71, 0.78)
"""Vertical positions of the layers and of the memory, as fractions of a card."""
_HIGH, _FRAME = 158, 76
"""Height of a card and of what surrounds all cards, in pixels."""
_NAMED = 10
"""Maximum number of layers whose names are written."""
_LIFT = 0.1
"""Distance from the cards of a link that passes around other cards, and between two such links."""
_WHOLE = 0.995
"""Fraction of a layer from which it counts as whole."""


class HeldLayer(NamedTuple):
    """The part of a layer's parameters that a rank holds, from `start` to `end` as fractions of the layer."""

    name: str
    num_params: int
    start: float = 0.0
    end: float = 1.0


class RankMeshInfo(NamedTuple):
    """Ranks of a mesh.

    Attributes:
        label: Name of the job.
        axes: Name and number of ranks of each axis, the outermost first.
        layers: What each rank holds of each layer, by rank; empty if unknown.
        held: Bytes that each rank holds at most, by type of memory as in `MEMORY_KINDS`, by rank; empty if unknown.
        sent: Bytes that each rank sends in a step, by axis.
        seconds: Time that a rank spends communicating in a step, by axis; along a pipeline, with its bubble, which a
            recorded step does not tell from waiting for messages.
        step_s: Time of a step.
        per_node: Number of ranks on a node; 0 if all ranks are on one machine.
        num_steps: Number of measured steps, of whose times these are the medians; 0 if bytes and times are predicted.
    """

    label: str
    axes: tuple[tuple[str, int], ...]
    layers: tuple[tuple[HeldLayer, ...], ...] = ()
    held: tuple[tuple[int, ...], ...] = ()
    sent: Mapping[str, tuple[int, ...]] = {}
    seconds: Mapping[str, float] = {}
    step_s: float = 0.0
    per_node: int = 0
    num_steps: int = 0

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return prod(size for _, size in self.axes)

    @property
    def used(self) -> tuple[str, ...]:
        """Axes with more than one rank."""
        return tuple(axis for axis, size in self.axes if size > 1)

    def measured(self, *steps: StepEvents) -> RankMeshInfo:
        """Return the same ranks with the bytes of the last of these recorded steps, and the medians of their times."""
        times = [waits_of(step) for step in steps]
        return self._replace(
            sent=_sent(steps[-1]),
            seconds={axis: median(own.get(axis, 0.0) for own in times) for each in times for axis in each},
            step_s=median(step.step_time_s for step in steps),
            num_steps=len(steps),
        )


def rank_mesh_info(prediction: JobPrediction, measured: StepEvents | None = None) -> RankMeshInfo:
    """Return the ranks of a predicted job; the arguments are the same as for `rank_mesh`."""
    job, kinds = prediction.job, prediction.kinds
    sent: dict[str, tuple[int, ...]] = {}
    for name, each in (prediction.traffic or {}).items():
        axis = axis_of(name) or ""
        own = tuple(map(int, each.bytes.tolist()))
        sent[axis] = tuple(map(sum, zip(sent.get(axis, (0,) * len(own)), own, strict=True)))
    info = RankMeshInfo(
        job.label, tuple(job.strategy.shape(job.world_size).items()), _layers(prediction),
        tuple(tuple(int(kinds[kind][rank]) for kind in MEMORY_KINDS) for rank in range(job.world_size))
        if all(kind in kinds for kind in MEMORY_KINDS)
        else (),
        sent, dict(_predicted_seconds(prediction)), prediction.step_time_s or 0.0,
        0 if prediction.emulated is None else prediction.emulated.per_node,
    )  # fmt: skip
    return info if measured is None else info.measured(measured)


def axes_info(job: Job, label: str) -> RankMeshInfo | None:
    """Return the ranks of a job that is not predicted: only their axes; None if they have one axis."""
    info = RankMeshInfo(label, tuple(job.strategy.shape(job.world_size).items()))
    return info if info.used else None


def _predicted_seconds(prediction: JobPrediction) -> Mapping[str, float]:
    found: dict[str, float] = {}
    terms = () if prediction.time is None else prediction.time.parts
    for part in (part for term in terms if term.name == "communication" for part in term.parts):
        if axis := axis_of(part.name):
            found[axis] = found.get(axis, 0.0) + part.value
    if "pipeline" in found:
        found["pipeline"] += bubble_s(prediction)
    return found


def _layers(prediction: JobPrediction) -> tuple[tuple[HeldLayer, ...], ...]:
    """Return what each rank holds of each layer: a tensor or expert rank its part of a divided layer, and all of the
    others.
    """
    strategy: Any = prediction.job.strategy
    shape = prediction.job.strategy.shape(prediction.job.world_size)
    if shape.get("pipeline", 1) > 1:
        return _layers_of_stages(prediction, shape)
    whole = {row.name: row.num_params for row in prediction.found.model.layers if row.num_params}
    own = {row.name: row.num_params for row in prediction.found.table.layers}
    axis = "expert" if getattr(strategy, "expert", 1) > 1 else "tensor"
    ranks = getattr(strategy, axis, 1)
    groups = strategy.groups(axis, prediction.job.world_size) if ranks > 1 else []
    place = {rank: k for group in groups for k, rank in enumerate(group)}
    return tuple(
        tuple(
            _part(name, total, own[name] / total, place.get(rank, 0), ranks) for name, total in whole.items()
        )
        for rank in range(prediction.job.world_size)
    )


def _layers_of_stages(
    prediction: JobPrediction, shape: Mapping[str, int]
) -> tuple[tuple[HeldLayer, ...], ...]:
    """Return what each rank holds of each layer, with the layers of other stages empty; tensor ranks share a layer."""
    strategy: Any = prediction.job.strategy
    step = strategy.pipeline_step(prediction.step)
    if step is None:
        return ()
    sizes, tensor = [row.num_elements for row in step.trace.parameters], shape.get("tensor", 1)
    held = strategy.stages.stages(step)
    found = []
    for rank in range(prediction.job.world_size):
        at = strategy.place(rank, prediction.job.world_size)
        index, layers = at.get("tensor", 0), list[HeldLayer]()
        for stage, pieces in held:
            own = stage == at["pipeline"]
            part = (index / tensor, (index + 1) / tensor) if own else (0.0, 0.0)
            layers += [
                HeldLayer(f"layer {len(layers) + k}", tensor * sum(sizes[p] for p in piece.parameters), *part)
                for k, piece in enumerate(pieces)
            ]
        found.append(tuple(layers))
    return tuple(found)


def _part(name: str, num_params: int, share: float, index: int, ranks: int) -> HeldLayer:
    if share >= _WHOLE or ranks == 1:
        return HeldLayer(name, num_params)
    start = index * (1 - share) / (ranks - 1)
    return HeldLayer(name, num_params, start, start + share)


def _sent(step: StepEvents) -> dict[str, tuple[int, ...]]:
    found: dict[str, list[int]] = {}
    for event in step.events:
        if event.num_bytes and (axis := axis_of(event.kind)):
            found.setdefault(axis, [0] * step.world_size)[event.rank] += event.num_bytes
    return {axis: tuple(sent) for axis, sent in found.items()}


def waits_of(step: StepEvents, only_axis: str = "") -> dict[str, float]:
    """Return the seconds in collectives on each axis, of the rank that waits least: the others also wait for it.

    Collectives of other axes are parts of passes, messages of the pipeline are not. Receives that were posted early
    go on while passes run, so only the rest of their time is counted: the messages and the bubble.

    Args:
        step: The events of the step.
        only_axis: Axis of collectives that do not name theirs.
    """
    spans: dict[int, dict[str, list[tuple[float, float]]]] = {rank: {} for rank in range(step.world_size)}
    passes: dict[int, list[tuple[float, float]]] = {rank: [] for rank in range(step.world_size)}
    for event in step.events:
        if event.lane == "compute":
            passes[event.rank].append((event.start_s, event.end_s))
        elif event.lane in {"communication", MESSAGE} and (axis := axis_of(event.kind) or only_axis):
            for rank in {event.rank, event.rank if event.peer is None else event.peer}:
                spans[rank].setdefault(axis, []).append((event.start_s, event.end_s))
    waits = [
        {axis: _outside(own, passes[rank] if axis == "pipeline" else []) for axis, own in of_rank.items()}
        for rank, of_rank in spans.items()
    ]
    return min(waits, key=lambda own: sum(own.values()))


def _outside(spans: Sequence[tuple[float, float]], passes: Sequence[tuple[float, float]]) -> float:
    return covered([*spans, *passes]) - covered(passes)


def rank_mesh_text(*infos: RankMeshInfo) -> str:
    """Return sentences on the bytes and the time of each axis, the most expensive first, as predicted and as measured.

    The last one says which axis takes longest.
    """
    shown = infos[-1]
    if not shown.used:
        return "This job has one axis of parallelism."
    degrees = " × ".join(f"{axis} {size}" for axis, size in shown.axes if size > 1)
    text = f"{shown.label} on {shown.world_size} ranks: {degrees}. "
    if not shown.sent:
        return f"{text}Its first step is still running, and its prediction is being computed."
    text += " ".join(map(_sentence, infos))
    first, *others = _by_cost(shown)
    if others and shown.seconds.get(first):
        is_pipeline = first == "pipeline"
        what, take = ("Communication and the bubble", "take") if is_pipeline else ("Communication", "takes")
        text += f" {what} along the {first} axis {take} longest."
    if shown.num_steps:
        text += " Measured times are those of the rank that waits least."
    return text


def _sentence(info: RankMeshInfo) -> str:
    parts = [
        f"{bytes_text(_most(info, axis))} along the {axis} axis{_time(info, axis)}" for axis in _by_cost(info)
    ]
    origin = "measured" if info.num_steps else "predicted"
    of_several = f" (median of {info.num_steps} steps)" if info.num_steps > 1 else ""
    return f"In a {origin} step{_of(info)}{of_several}, a rank sends {listed(parts)}."


def _by_cost(info: RankMeshInfo) -> list[str]:
    of_experts = [axis for axis in info.sent if axis and axis not in dict(info.axes)]
    return sorted([*info.used, *of_experts], key=lambda axis: -info.seconds.get(axis, 0.0))


def _of(info: RankMeshInfo) -> str:
    return f" of {duration_text(info.step_s)}" if info.step_s else ""


def _time(info: RankMeshInfo, axis: str) -> str:
    bubble = " with the bubble" if axis == "pipeline" else ""
    return f" in {duration_text(info.seconds[axis])}{bubble}" if info.seconds.get(axis) else ""


def _most(info: RankMeshInfo, axis: str) -> int:
    return max(info.sent.get(axis, (0,)))


def grid_places(axes: Sequence[tuple[str, int]]) -> tuple[int, int, list[tuple[float, float]]]:
    """Return the numbers of columns and rows of a mesh, and the column and row of each rank.

    The innermost axis runs along the shorter side of the grid; groups along the outermost of three or more axes have a
    gap between them.
    """
    used = [size for _, size in axes if size > 1]
    world_size, inner = prod(used), used[-1] if used else 1
    outer, gap = world_size // inner, _BLOCK if len(used) > 2 else 0.0
    is_across = inner > outer
    places = []
    for rank in range(world_size):
        k, at = rank // inner, rank % inner
        along = k + gap * (k // (outer // used[0])) if gap else float(k)
        places.append((float(at), along) if is_across else (along, float(at)))
    return (inner, outer, places) if is_across else (outer, inner, places)


def draw_rank_mesh(info: RankMeshInfo) -> go.Figure:
    """Draw the cards, with their layers and memory, and the links between them."""
    if not 1 < info.world_size <= MOST_CARDS:
        return theme.blank()
    places = grid_places(info.axes)[2]
    corners = [(x * (1 + _GAPS[0]), y * (1 + _GAPS[1])) for x, y in places]
    shapes = [*_nodes(info, corners), *map(_card, corners)]
    wide, high = max(x for x, _ in corners) + 1, max(y for _, y in corners) + 1
    figure = go.Figure([*_links(info, corners), *_bars(info, corners)])
    names = [*_names(info, corners)]
    levels = [y for axis in info.used for _, path in _paths(info, corners, axis) for _, y in path]
    low, high = min(levels), max(*levels, high)
    rows: dict[str, Any] = {
        "showgrid": False, "showline": False, "fixedrange": True, "tickvals": [at for at, _ in names],
        "ticktext": [text for _, text in names],
        "tickfont": {"size": 10, "color": theme.GREY}, "range": [high + 0.06, min(low, 0.0) - 0.1],
    }  # fmt: skip
    return theme.style(
        figure, height=round(high * _HIGH) + _FRAME, barmode="overlay", shapes=shapes,
        annotations=[*_titles(info, corners), *_amounts(info, corners)],
        xaxis={"visible": False, "fixedrange": True, "range": [-0.06, wide + 0.06]}, yaxis=theme.axis(**rows),
        legend=theme.LEGEND_ABOVE | {"traceorder": "normal"}, margin={"l": 4, "r": 4, "t": 48, "b": 2},
    )  # fmt: skip


Corners = Sequence[tuple[float, float]]


def _card(corner: tuple[float, float]) -> dict[str, Any]:
    x, y = corner
    return {
        "type": "rect", "x0": x, "x1": x + 1, "y0": y, "y1": y + 1, "line": {"color": theme.AXIS, "width": 1.2},
        "fillcolor": "rgba(127,132,141,0.06)", "layer": "below",
    }  # fmt: skip


def _nodes(info: RankMeshInfo, corners: Corners) -> Iterator[dict[str, Any]]:
    """Yield a frame around the ranks of each node, where they are next to each other."""
    if not info.per_node:
        return
    for first in range(0, info.world_size, info.per_node):
        own = corners[first : first + info.per_node]
        x0, x1 = min(x for x, _ in own), max(x for x, _ in own) + 1
        y0, y1 = min(y for _, y in own), max(y for _, y in own) + 1
        inside = sum(x0 <= x < x1 and y0 <= y < y1 for x, y in corners)
        if inside == len(own):
            yield {
                "type": "rect", "x0": x0 - 0.05, "x1": x1 + 0.05, "y0": y0 - 0.05, "y1": y1 + 0.05,
                "line": {"color": theme.GREY, "width": 1.4, "dash": "dot"}, "layer": "below",
            }  # fmt: skip


def _links(info: RankMeshInfo, corners: Corners) -> Iterator[dict[str, Any]]:
    """Yield one trace for each axis: lines from each rank to the next one of its group."""
    most = max((_most(info, axis) for axis in info.used), default=0) or 1
    for axis in info.used:
        paths = [path for _, path in _paths(info, corners, axis)]
        name = f"{axis}: {bytes_text(_most(info, axis))} from each rank{_time(info, axis)}"
        yield {
            "type": "scatter", "mode": "lines", "name": name, "hoverinfo": "skip",
            "x": [x for path in paths for x in (*(x for x, _ in path), None)],
            "y": [y for path in paths for y in (*(y for _, y in path), None)],
            "line": {"color": theme.axis_colour(axis), "width": 2.5 + 6 * (_most(info, axis) / most) ** 0.5},
        }  # fmt: skip


def _pairs(info: RankMeshInfo, axis: str) -> list[tuple[int, int]]:
    groups = axis_groups(dict(info.axes), axis)
    return [pair for group in groups for pair in pairwise(group)]


Path = Sequence[tuple[float, float]]


def _paths(info: RankMeshInfo, corners: Corners, axis: str) -> Iterator[tuple[int, Path]]:
    """Yield the first rank of each link along an axis, and the link's corners; links pass around cards in between."""
    seen: dict[float, int] = {}
    bottom = max(y for _, y in corners)
    for a, b in _pairs(info, axis):
        (x0, y0), (x1, y1) = corners[a], corners[b]
        if y0 != y1:
            yield a, ((x0 + 0.5, y0 + 1), (x1 + 0.5, y1))
        elif not any(x0 < x < x1 and y == y0 for x, y in corners):
            yield a, ((x0 + 1, y0 + 0.5), (x1, y1 + 0.5))
        else:
            edge, way = (y0 + 1, 1) if 0 < y0 == bottom else (y0, -1)
            level = edge + way * _LIFT * (1 + seen.setdefault(y0, 0))
            seen[y0] += 1
            yield a, ((x0 + 0.5, edge), (x0 + 0.5, level), (x1 + 0.5, level), (x1 + 0.5, edge))


def _bars(info: RankMeshInfo, corners: Corners) -> Iterator[dict[str, Any]]:
    """Yield the layers of all cards, and their memory, as bars."""
    rows: dict[str, list[tuple[float, float, float, float, str]]] = {}
    for rank, (x, y) in enumerate(corners):
        for at, size, layer in _strips(info, rank):
            rows.setdefault("not held", []).append(
                (x + 0.06, 0.88, y + at, size, f"<b>rank {rank}</b>: {layer.name}")
            )
            if layer.end == layer.start:
                continue
            is_whole = layer.end - layer.start >= _WHOLE
            kind = "whole layer" if is_whole else "part of a layer"
            part = count_text(layer.num_params * (layer.end - layer.start))
            hover = f"<b>rank {rank}</b> holds {part} of {count_text(layer.num_params)} parameters of {layer.name}"
            start = x + 0.06 + 0.88 * layer.start
            rows.setdefault(kind, []).append((start, 0.88 * (layer.end - layer.start), y + at, size, hover))
        if info.held:
            scale, left = 0.88 / max(map(sum, info.held)), x + 0.06
            for kind, size in zip(MEMORY_KINDS, info.held[rank], strict=True):
                middle, high = sum(_MEMORY) / 2, _MEMORY[1] - _MEMORY[0]
                hover = f"<b>rank {rank}</b>: {bytes_text(size)} of {kind}"
                rows.setdefault(kind, []).append((left, size * scale, y + middle, high, hover))
                left += size * scale
    for kind in sorted(rows, key=lambda kind: kind != "not held"):
        yield _trace(kind, rows[kind])


_LOOKS = {
    "whole layer": theme.RunStyle("#7db8e8"), "part of a layer": theme.RunStyle("#1f6fb5"),
    "not held": theme.RunStyle("rgba(127,132,141,0.22)"),
}  # fmt: skip


def _trace(kind: str, rows: Sequence[tuple[float, float, float, float, str]]) -> dict[str, Any]:
    look = _LOOKS.get(kind) or theme.MEMORY_LOOKS[kind]
    base, size, place, high, hover = map(list, zip(*rows, strict=True))
    return {
        "type": "bar", "orientation": "h", "base": base, "x": size, "y": place, "width": high, "hovertext": hover,
        "name": kind, "marker": theme.striped(look, size=5, solidity=0.22) | {"line": {"width": 0}},
        "showlegend": kind in {"whole layer", "part of a layer"},
        "hovertemplate": "%{hovertext}<extra></extra>",
    }  # fmt: skip


def _strips(info: RankMeshInfo, rank: int) -> Iterator[tuple[float, float, HeldLayer]]:
    """Yield vertical centre and height of each layer of a card, from its top."""
    layers = info.layers[rank] if info.layers else ()
    each = (_LAYERS[1] - _LAYERS[0]) / max(len(layers), 1)
    for k, layer in enumerate(layers):
        yield _LAYERS[0] + each * (k + 0.5), each * 0.8, layer


def _note(text: str, x: float, y: float, **more: Any) -> dict[str, Any]:
    return {
        "text": text, "x": x, "y": y, "showarrow": False, "xanchor": "left", "yanchor": "middle",
        "font": {"size": 11, "color": theme.GREY}, **more,
    }  # fmt: skip


def _titles(info: RankMeshInfo, corners: Corners) -> Iterator[dict[str, Any]]:
    """Yield a card's texts: the rank, the most that it holds, and its index on each axis."""
    for rank, (x, y) in enumerate(corners):
        yield _note(f"<b>rank {rank}</b>", x + 0.05, y + 0.09, font={"size": 12, "color": theme.GREY})
        small = {"font": {"size": 10, "color": theme.GREY}}
        if info.held:
            yield _note(bytes_text(sum(info.held[rank])), x + 0.95, y + 0.09, xanchor="right", **small)
        places, left = [], rank
        for axis, size in reversed(info.axes):
            places += [f"{axis} {left % size}"] if size > 1 else []
            left //= size
        for line, text in enumerate((" · ".join(reversed(places[1:])), places[0])):
            yield _note(text, x + 0.5, y + 0.85 + 0.09 * line, xanchor="center", **small)


def _names(info: RankMeshInfo, corners: Corners) -> Iterator[tuple[float, str]]:
    """Yield the names of the layers beside the first card of each row, with their vertical positions."""
    if info.layers and len(info.layers[0]) <= _NAMED:
        for rank, (x, y) in enumerate(corners):
            yield from ((y + at, layer.name) for at, _, layer in (_strips(info, rank) if x == 0 else ()))


def _amounts(info: RankMeshInfo, corners: Corners) -> Iterator[dict[str, Any]]:
    """Yield the bytes that the first of two linked ranks sends along the axis, beside each link."""
    for axis in info.used:
        sent = info.sent.get(axis, ())
        for a, path in _paths(info, corners, axis) if sent else ():
            (x0, y0), (x1, y1) = path[len(path) // 2 - 1 : len(path) // 2 + 1]
            is_across = y0 == y1
            along = (2 * x0 + x1) / 3 if len(path) > 2 else (x0 + x1) / 2
            at = (along, y0 - 0.06) if is_across else (x0 + 0.05, (y0 + y1) / 2)
            yield _note(
                bytes_text(sent[a]), *at, xanchor="center" if is_across else "left",
                font={"size": 10.5, "color": theme.axis_colour(axis)},
            )  # fmt: skip


def rank_mesh(prediction: JobPrediction, measured: StepEvents | None = None) -> go.Figure:
    """Draw the ranks of a job with several axes: what each holds of which layer, its memory, and bytes along each axis.

    Args:
        prediction: The job's prediction, which knows the parts of layers.
        measured: A recorded step, whose bytes and times are drawn instead of the predicted ones; None for none.

    Example:
        >>> rank_mesh(ss.predict(job), run.step_events())  # doctest: +SKIP
    """
    return draw_rank_mesh(rank_mesh_info(prediction, measured))
