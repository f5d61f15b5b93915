"""Lineage of the weights in population-based training: a tree over intervals, with one dot per member and interval.

The parent of a dot, drawn to its left, is the interval from whose checkpoint it resumed. Each leaf has its own row, and
a parent is centred on its children, so no two lines cross.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import log10
from typing import Any, NamedTuple

import plotly.graph_objects as go

from shardscope.tuning.population.view import MemberInterval, Population
from shardscope_widgets.figures import theme
from shardscope_widgets.words import listed, plural, safe, three_digits

WORST_TO_BEST = ("#f2c14e", "#e58a3c", "#cf5b4f", "#a34a86", "#6f55b5", "#3f6fc4", "#2f93b8", "#1f9f8a")
"""Colours from the worst score to the best, which also differ in brightness."""
EXPLOIT, ANCESTRY = "#e06c2c", "#1f9f8a"
_ROW, _EDGES = 30, 130
"""Height of a row, and total height of the margins above and below the rows, in pixels."""
_BEND = tuple(at / 16 for at in range(17))


class Node(NamedTuple):
    """One interval of one member, as a node of the tree."""

    interval: int
    member: int
    row: float
    """Vertical position from the top; integers for leaves."""
    parent: int | None
    """Index in `LineageInfo.nodes` of the node from whose checkpoint this node resumed; None if there is none."""
    origin: str
    score: float | None
    state: str
    """State of the interval: ``over``, ``failed`` or ``under way``."""
    is_ancestor: bool
    """Whether this is the best member's newest node, or one of that node's ancestors."""
    hover: tuple[str, ...]


class LineageInfo(NamedTuple):
    """Nodes of the tree, and the objective by which they are coloured; `rows` is the number of leaves."""

    nodes: tuple[Node, ...]
    objective: str
    steps: int
    """Number of steps per interval."""
    rows: int


def lineage_info(population: Population, objective: str | None = None) -> LineageInfo:
    """Compute the tree of a population, coloured by `objective` (by default the plan's first objective)."""
    entries, plan = list(population.entries()), population.plan
    objective = objective or plan.objectives[0]
    places = {(entry.interval, entry.member): at for at, entry in enumerate(entries)}
    parents = [
        None if entry.move.parent is None else places[entry.interval - 1, entry.move.parent]
        for entry in entries
    ]
    scores = [_score(entry, objective) for entry in entries]
    rows, count = _rows(parents)
    ancestors = _ancestors(_best(entries, scores), parents)
    nodes = tuple(
        Node(
            entry.interval, entry.member, rows[at], parents[at], entry.move.origin, scores[at], _state(entry),
            at in ancestors, _hover(entry, entries, parents[at], plan.interval_steps),
        )
        for at, entry in enumerate(entries)
    )  # fmt: skip
    return LineageInfo(nodes, objective, plan.interval_steps, count)


def _score(entry: MemberInterval, objective: str) -> float | None:
    scores = None if entry.outcome is None else entry.outcome.scores
    return None if scores is None else scores.get(objective)


def _state(entry: MemberInterval) -> str:
    if entry.outcome is None:
        return "under way"
    return "over" if entry.outcome.scores is not None else "failed"


def _rows(parents: Sequence[int | None]) -> tuple[list[float], int]:
    """Return the row of every node, and the number of leaves.

    Args:
        parents: Index of each node's parent, None for a root; parents come before their children.
    """
    children: dict[int | None, list[int]] = {}
    for at, parent in enumerate(parents):
        children.setdefault(parent, []).append(at)
    rows, ends = [0.0] * len(parents), 0
    stack = list(reversed(children.get(None, [])))
    order = []
    while stack:
        at = stack.pop()
        order.append(at)
        if at not in children:
            rows[at], ends = float(ends), ends + 1
        stack += reversed(children.get(at, []))
    for at in reversed(order):
        if at in children:
            own = [rows[child] for child in children[at]]
            rows[at] = (min(own) + max(own)) / 2
    return rows, ends


def _best(entries: Sequence[MemberInterval], scores: Sequence[float | None]) -> int | None:
    """Return the index of the best entry in the last interval that all members have finished."""
    open_ones = [entry.interval for entry in entries if entry.outcome is None]
    last = max((e.interval for e in entries if e.interval < min(open_ones, default=10**9)), default=0)
    found = [
        (score, at) for at, score in enumerate(scores) if score is not None and entries[at].interval == last
    ]
    return min(found)[1] if found else None


def _ancestors(at: int | None, parents: Sequence[int | None]) -> set[int]:
    found: set[int] = set()
    while at is not None:
        found.add(at)
        at = parents[at]
    return found


def _hover(
    entry: MemberInterval, entries: Sequence[MemberInterval], parent: int | None, steps: int
) -> tuple[str, ...]:
    """Return lines of plain text with member and steps, outcome, origin and settings."""
    outcome, before = entry.outcome, {} if parent is None else entries[parent].move.settings
    first = (entry.interval - 1) * steps + 1
    lines = [f"member {entry.member}, steps {first} to {entry.interval * steps}"]
    if outcome is None:
        lines.append("running or not yet started")
    elif outcome.scores is None:
        lines.append(outcome.failure or "failed")
    else:
        lines += [f"{name} {three_digits(score)}" for name, score in outcome.scores.items()]
    if entry.move.origin == "cloned":
        lines.append(f"copied member {entry.move.parent}, then explored:")
    lines += [_setting(path, value, before) for path, value in entry.move.settings.items()]
    return (*lines, *(outcome.notes if outcome is not None else ()))


def _setting(path: str, value: Any, before: Mapping[str, Any]) -> str:
    now = _value(value)
    was = _value(before.get(path, value))
    return f"{path} {now}" if was == now else f"{path} {was} → {now}"


def _value(value: Any) -> str:
    if isinstance(value, Mapping):
        name, *rest = [
            _value(part) if key == "name" else f"{key}={_value(part)}" for key, part in value.items()
        ]
        return " ".join([name, *rest])
    return three_digits(value) if isinstance(value, int | float) else str(value)


def lineage_text(info: LineageInfo) -> str:
    """Return sentences on how often members copied other members, and on the members that trained the best weights."""
    if not info.nodes:
        return "No member has started."
    members = len({node.member for node in info.nodes})
    clones = sum(node.origin == "cloned" for node in info.nodes)
    failed = sum(node.state == "failed" for node in info.nodes)
    last = max(node.interval for node in info.nodes)
    began = f"{plural(members, 'member')}, {plural(last, 'interval')} of {info.steps} steps."
    line = [node for node in info.nodes if node.is_ancestor]
    took = f" A member copied a better one {plural(clones, 'time')}." if clones else ""
    lost = f" {plural(failed, 'interval')} of a member failed." if failed else ""
    if not line:
        return f"{began}{took}{lost}"
    who = listed(f"member {member}" for member in dict.fromkeys(node.member for node in line))
    score = "" if line[-1].score is None else f", {info.objective} {three_digits(line[-1].score)}"
    return (
        f"{began}{took}{lost} The best is member {line[-1].member}{score}; its weights were trained by {who}."
    )


# Drawing.


def lineage(population: Population, objective: str | None = None) -> go.Figure:
    """Draw the lineage of a population: which members kept their weights, and which copied another, coloured by score.

    Example:
        >>> lineage(ss.Population("runs/20261121-190000-population-ring-mlp"))  # doctest: +SKIP
    """
    info = lineage_info(population, objective)
    figure = go.Figure([*_lines(info), *_dots(info)])
    last = max((node.interval for node in info.nodes), default=1)
    figure.update_layout(
        xaxis=theme.axis(
            "steps trained", showgrid=False, tickvals=[at * info.steps for at in range(1, last + 1)],
            range=[0.45 * info.steps, (last + 0.55) * info.steps],
        ),
        yaxis=theme.axis(showgrid=False, showticklabels=False, showline=False, range=[info.rows - 0.3, -0.7]),
    )  # fmt: skip
    return theme.style(
        figure,
        height=max(220, _EDGES + _ROW * info.rows),
        head=40,
        legend=theme.LEGEND_ABOVE | {"itemsizing": "constant"},
    )


def _lines(info: LineageInfo) -> list[go.Scatter]:
    ends = [(info.nodes[node.parent], node) for node in info.nodes if node.parent is not None]
    kept = [pair for pair in ends if pair[1].origin == "kept"]
    cloned = [pair for pair in ends if pair[1].origin == "cloned"]
    best = [pair for pair in ends if pair[1].is_ancestor]
    return [
        _line(info, best, "ancestry of the best", {"color": ANCESTRY, "width": 9}, opacity=0.35),
        _line(info, kept, "continues", {"color": theme.GREY, "width": 1.4}),
        _line(info, cloned, "copies a better member", {"color": EXPLOIT, "width": 2.2, "dash": "dot"}),
    ]


def _line(
    info: LineageInfo,
    pairs: Sequence[tuple[Node, Node]],
    name: str,
    line: dict[str, Any],
    opacity: float = 1.0,
) -> go.Scatter:
    """Return smooth curves from each parent to its child, horizontal at both ends."""
    x: list[float | None] = []
    y: list[float | None] = []
    for parent, node in pairs:
        for share in _BEND if parent.row != node.row else (0.0, 1.0):
            x.append((parent.interval + share) * info.steps)
            y.append(parent.row + (node.row - parent.row) * share * share * (3 - 2 * share))
        x.append(None)
        y.append(None)
    return go.Scatter(
        x=x, y=y, mode="lines", name=name, line=line, opacity=opacity, hoverinfo="skip",
        showlegend=bool(pairs),
    )  # fmt: skip


def _dots(info: LineageInfo) -> list[go.Scatter]:
    scored = [node for node in info.nodes if node.score is not None]
    values = _heights([node.score for node in scored if node.score is not None])
    low, high = (min(values), max(values)) if values else (0.0, 1.0)
    shares = [(value - low) / (high - low) if high > low else 1.0 for value in values]
    over = _marks(info, scored, f"{info.objective} at the end of the interval").update(
        marker={
            "size": 19, "color": shares, "cmin": 0, "cmax": 1,
            "colorscale": [[at / (len(WORST_TO_BEST) - 1), colour] for at, colour in enumerate(WORST_TO_BEST)],
            "line": {"width": 1, "color": theme.GREY},
            "colorbar": _colour_bar(info, scored, shares),
        },
        textfont={"size": 10, "color": [theme.ink_on(_colour(share)) for share in shares]},
        showlegend=False,
    )  # fmt: skip
    failed = _marks(info, [node for node in info.nodes if node.state == "failed"], "failed").update(
        marker={"symbol": "x", "size": 12, "color": "#c5372c"}, mode="markers"
    )
    open_ones = _marks(info, [node for node in info.nodes if node.state == "under way"], "under way").update(
        marker={"symbol": "circle-open", "size": 13, "color": theme.GREY},
        textfont={"size": 11, "color": theme.GREY},
        textposition="middle right",
    )
    return [over, *(trace for trace in (failed, open_ones) if trace.x)]


def _marks(info: LineageInfo, nodes: Sequence[Node], name: str) -> go.Scatter:
    return go.Scatter(
        x=[node.interval * info.steps for node in nodes], y=[node.row for node in nodes],
        text=[str(node.member) for node in nodes], mode="markers+text", name=name, textposition="middle center",
        customdata=[["<br>".join([f"<b>{safe(node.hover[0])}</b>", *map(safe, node.hover[1:])])] for node in nodes],
        hovertemplate="%{customdata[0]}<extra></extra>",
    )  # fmt: skip


def _heights(scores: Sequence[float]) -> list[float]:
    """Return scores transformed so that higher is better: negated logarithms if all are positive, else negated."""
    return (
        [-log10(score) for score in scores]
        if all(score > 0 for score in scores)
        else [-score for score in scores]
    )


def _colour(share: float) -> str:
    return WORST_TO_BEST[min(round(share * (len(WORST_TO_BEST) - 1)), len(WORST_TO_BEST) - 1)]


def _colour_bar(info: LineageInfo, scored: Sequence[Node], shares: Sequence[float]) -> dict[str, Any]:
    """Return a colour bar labelled with the worst score, the best score and some scores in between."""
    known = sorted(zip(shares, (node.score or 0.0 for node in scored), strict=True))
    ticks: list[tuple[float, float]] = []
    for share, score in known[:1] + known[-1:] + known:
        if all(abs(share - seen) > 0.22 for seen, _ in ticks):
            ticks.append((share, score))
    return {
        "title": {"text": info.objective, "side": "top"}, "thickness": 12, "len": 0.9, "outlinewidth": 0,
        "tickvals": [share for share, _ in ticks], "ticktext": [three_digits(score) for _, score in ticks],
    }  # fmt: skip
