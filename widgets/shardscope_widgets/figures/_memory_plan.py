"""Predicted memory of a plan: a stacked bar per pipeline stage, a block per memory term, and the device capacity."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, cached_property, lru_cache
from typing import Any, NamedTuple

import plotly.graph_objects as go

from shardscope.analytic.memory import KINDS, SYMBOLS
from shardscope.analytic.terms import Term
from shardscope.spec.units import gib_text
from shardscope_widgets.figures import theme
from shardscope_widgets.figures.theme import RunStyle
from shardscope_widgets.words import bytes_text, listed, safe, three_digits

GIB = 2**30
KIND_NAMES = {"optimizer": "optimizer state"}
_HEAD_PX, _FOOT_PX = 64, 40
_ROWS_PX = ((2, 64), (4, 46), (8, 30), (16, 20), (32, 12))
_FEWEST_PX = 8
_NAMED_UP_TO = 4
"""Maximum number of stages for which blocks are labelled."""
_OVER = "rgba(197,55,44,0.10)"
_WIDTH = 78  # characters in a line of a tooltip


class Block(NamedTuple):
    """One memory term of one stage."""

    name: str
    kind: str
    num_bytes: float
    formula: str
    inputs: tuple[tuple[str, str], ...]
    source: str

    @property
    def gib(self) -> float:
        """Size in GiB."""
        return self.num_bytes / GIB


@dataclass(frozen=True)
class StageBar:
    """The bar of one pipeline stage."""

    name: str
    blocks: tuple[Block, ...]

    @cached_property
    def num_bytes(self) -> float:
        """Total bytes of all blocks."""
        return sum(block.num_bytes for block in self.blocks)


@dataclass(frozen=True)
class MemoryPlanInfo:
    """The bars of all pipeline stages, and the capacity of a device in bytes."""

    stages: tuple[StageBar, ...]
    capacity_bytes: float
    device: str

    @cached_property
    def fullest(self) -> int:
        """Index of the stage with the highest peak memory."""
        return max(range(len(self.stages)), key=lambda place: self.stages[place].num_bytes)


def memory_plan_info(memory: Term, *, capacity_bytes: float, device: str) -> MemoryPlanInfo:
    """Return the stages and blocks of a term tree from `analytic.memory.memory_term`.

    Args:
        memory: The term tree: stages, then types of memory, then blocks.
        capacity_bytes: Memory of the device for tensors in bytes; see `analytic.memory.tensor_room`.
        device: Name of the device for the label.
    """
    return MemoryPlanInfo(tuple(map(_stage_bar, memory.parts)), capacity_bytes, device)


def _stage_bar(stage: Term) -> StageBar:
    blocks = [_block(kind.name, part) for kind in stage.parts for part in kind.parts]
    return StageBar(stage.name, tuple(blocks))


def _block(kind: str, term: Term) -> Block:
    inputs = tuple((symbol, _value_text(symbol, value)) for symbol, value in term.inputs.items())
    return Block(term.name, kind, term.value, term.formula, inputs, term.source)


@lru_cache(maxsize=4096)
def _value_text(symbol: str, value: float | str) -> str:
    if isinstance(value, str):
        return value
    if symbol == "bytes per layer":
        return bytes_text(value)
    return f"{value:,.0f}" if value >= 100 or value == int(value) else three_digits(value)


def memory_plan_text(info: MemoryPlanInfo) -> str:
    """Return a sentence on the stage that uses the most memory, and on its memory by type."""
    stage = info.stages[info.fullest]
    where = (
        f"{stage.name.capitalize()} of {len(info.stages)} uses the most memory. It"
        if info.stages[1:]
        else "Each device"
    )
    kinds = {kind: sum(block.num_bytes for block in stage.blocks if block.kind == kind) for kind in KINDS}
    parts = sorted(
        ((size, kind) for kind, size in kinds.items() if size >= 0.005 * stage.num_bytes), reverse=True
    )
    shares = [
        f"{size / stage.num_bytes:.0%} {KIND_NAMES.get(kind, kind)} ({gib_text(size)})"
        for size, kind in parts
    ]
    held, room = gib_text(stage.num_bytes), gib_text(info.capacity_bytes)
    of_room = (
        f"needs {held} of the {room} that a device has for tensors"
        if stage.num_bytes <= info.capacity_bytes
        else f"needs {held}, but a device has only {room} for tensors"
    )
    return f"{where} {of_room}: {listed(shares)}."


def figure_dict(info: MemoryPlanInfo) -> dict[str, Any]:
    """Return data and layout as plain dictionaries, so that redraws during slider moves skip Plotly's validation."""
    most = max(info.capacity_bytes, *(stage.num_bytes for stage in info.stages)) / GIB
    return {"data": [*_traces(info), _totals(info)], "layout": _layout(info, 1.13 * most)}


def memory_plan(memory: Term, *, capacity_bytes: float, device: str = "") -> go.Figure:
    """Draw the predicted memory of each pipeline stage by block, with a dashed line at the capacity of a device.

    Example:
        >>> memory_plan(memory_term(model, layout), capacity_bytes=80e9, device="A100 80GB")  # doctest: +SKIP
    """
    info = memory_plan_info(memory, capacity_bytes=capacity_bytes, device=device)
    return go.Figure(figure_dict(info))


def _traces(info: MemoryPlanInfo) -> list[dict[str, Any]]:
    """Return one trace per block name, ordered by type of memory."""
    columns: dict[tuple[str, str], dict[int, Block]] = {}
    for place, stage in enumerate(info.stages):
        for block in stage.blocks:
            columns.setdefault((block.kind, block.name), {})[place] = block
    traces = []
    for kind in KINDS:
        own = [blocks for (other, _), blocks in columns.items() if other == kind]
        traces += [_trace(info, blocks, number) for number, blocks in enumerate(own)]
    return traces


def _trace(info: MemoryPlanInfo, blocks: dict[int, Block], number: int) -> dict[str, Any]:
    """Return the trace of all blocks with the same name, by stage; `number` is the name's index within its type."""
    first = next(iter(blocks.values()))
    look = theme.MEMORY_LOOKS[first.kind]
    colour = theme.tint(look.colour, 0.2 * number)
    sizes = [gib_text(block.num_bytes) for block in blocks.values()]
    named = len(info.stages) <= _NAMED_UP_TO
    return {
        "type": "bar",
        "orientation": "h",
        "x": [block.gib for block in blocks.values()],
        "y": list(blocks),
        "width": 0.78,
        "name": KIND_NAMES.get(first.kind, first.kind),
        "legendgroup": first.kind,
        "showlegend": number == 0,
        "marker": _marker(look, colour),
        "customdata": [
            (info.stages[place].name, size, _inputs_text(block.inputs))
            for (place, block), size in zip(blocks.items(), sizes, strict=True)
        ],
        "hovertemplate": _hover(first),
        "text": [f"{first.name}<br>{size}" for size in sizes] if named else [],
        "textposition": "inside",
        "insidetextanchor": "middle",
        "textangle": 0,
        "constraintext": "inside",
        "insidetextfont": {"color": theme.ink_on(colour), "size": 11},
    }


def _marker(look: RunStyle, colour: str) -> dict[str, Any]:
    marker = theme.striped(look, white=0.45, fillmode="overlay", size=7, solidity=0.14)
    return marker | {"color": colour, "line": {"width": 1, "color": "rgba(255,255,255,0.55)"}}


def _hover(block: Block) -> str:
    """Return hover text with name, size, formula, inputs and source, in Plotly's markup."""
    formula, source = "<br>".join(_wrapped(f"= {block.formula}")), "<br>".join(_wrapped(block.source))
    head = f"<b>{block.name}</b>, %{{customdata[0]}}: %{{customdata[1]}}"
    return f"{head}<br>{formula}<br>%{{customdata[2]}}<br><i>{source}</i><extra></extra>"


@lru_cache(maxsize=4096)
def _inputs_text(inputs: tuple[tuple[str, str], ...]) -> str:
    return "<br>".join(_wrapped(", ".join(f"{symbol} = {value}" for symbol, value in inputs)))


@lru_cache(maxsize=4096)
def _wrapped(text: str) -> tuple[str, ...]:
    lines = [""]
    for word in safe(text).split(" "):
        if lines[-1] and len(lines[-1]) + len(word) >= _WIDTH:
            lines.append("")
        lines[-1] = f"{lines[-1]} {word}".strip()
    return tuple(lines)


def _totals(info: MemoryPlanInfo) -> dict[str, Any]:
    return {
        "type": "scatter",
        "mode": "text",
        "x": [stage.num_bytes / GIB for stage in info.stages],
        "y": list(range(len(info.stages))),
        "text": [f" {gib_text(stage.num_bytes)}" for stage in info.stages] if len(info.stages) <= 32 else [],
        "textposition": "middle right",
        "textfont": {"size": 12 if len(info.stages) <= 16 else 10},
        "hoverinfo": "skip",
        "showlegend": False,
        "cliponaxis": False,
    }


def _layout(info: MemoryPlanInfo, right: float) -> dict[str, Any]:
    count = len(info.stages)
    row_px = next((px for most, px in _ROWS_PX if count <= most), _FEWEST_PX)
    capacity = info.capacity_bytes / GIB
    beyond = {"type": "rect", "x0": capacity, "x1": right, "y0": 0, "y1": 1, "yref": "paper", "fillcolor": _OVER,
              "line": {"width": 0}, "layer": "below"}  # fmt: skip
    named = f"{info.device}: " if info.device else ""
    words = theme.note(f"{named}{gib_text(info.capacity_bytes)} for tensors", x=capacity, y=1)
    anchor = "right" if capacity > right / 2 else "left"  # so that a narrow figure has space for the words
    every = max(1, -(-count // 16))
    return _look(_HEAD_PX + _FOOT_PX + row_px * count) | {
        "template": None,
        "xaxis": theme.axis(ticksuffix=" GiB", range=[0, right], nticks=8),
        "yaxis": theme.axis(
            tickvals=list(range(0, count, every)),
            ticktext=[f"{info.stages[place].name} " if count > 1 else "" for place in range(0, count, every)],
            range=[count - 0.5, -0.5], showgrid=False, fixedrange=True,
        ),
        "shapes": [beyond, theme.rule(theme.GREY, x=capacity, width=1.8)],
        "annotations": [words | {"xref": "x", "xanchor": anchor, "font": {"size": 11, "color": theme.GREY}}],
    }  # fmt: skip


@cache
def _look(height: int) -> dict[str, Any]:
    """Return the common layout as a plain dictionary."""
    figure = theme.style(
        go.Figure(), height=height, barmode="stack", legend=theme.LEGEND_ABOVE,
        margin={"l": 8, "r": 16, "t": _HEAD_PX, "b": 8}, uniformtext={"mode": "hide", "minsize": 9},
        hoverlabel={"bgcolor": theme.HOVER, "bordercolor": theme.HOVER, "align": "left",
                    "font": {"color": "#f4f5f7", "family": theme.FONT, "size": 12}},
    )  # fmt: skip
    look: dict[str, Any] = figure.layout.to_plotly_json()
    return look


def table_rows(info: MemoryPlanInfo) -> Sequence[Block]:
    """Return the blocks of the stage with the most memory, largest first."""
    return sorted(info.stages[info.fullest].blocks, key=lambda block: -block.num_bytes)


_LETTERS = re.compile(rf"(?<![A-Za-z])[{''.join(symbol[0] for symbol in SYMBOLS)}]+′?(?![A-Za-z′])")
"""Symbols in a formula; products may be written without a sign, such as ``bsh``."""


def symbols_text(info: MemoryPlanInfo) -> str:
    """Return the meaning of the symbols in the formulas of `table_rows`."""
    found = {
        symbol
        for block in table_rows(info)
        for letters in _LETTERS.findall(block.formula)
        for symbol in SYMBOLS
        if symbol in letters and (symbol != "t" or "t′" not in letters)
    }
    return "; ".join(f"{symbol}: {meaning}" for symbol, meaning in SYMBOLS.items() if symbol in found)
