"""Parallel coordinates of a study: each complete trial is a line from its settings to its objective.

The plot shows settings that good trials share and bad trials do not.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import log10
from typing import Any, NamedTuple

import plotly.graph_objects as go

from shardscope.spec.space import Between, PowersOfTwo, Space
from shardscope_widgets.figures import theme
from shardscope_widgets.figures._front import CHOSEN, is_wide
from shardscope_widgets.figures._lineage import WORST_TO_BEST
from shardscope_widgets.figures._trials import (
    TrialInfo,
    objective_text,
    settings_of,
    short_name,
    title_of,
    value_text,
)
from shardscope_widgets.words import plural, safe

Spec = dict[str, Any]
NOT_DRAWN = "not used"
"""Tick label for trials that did not sample a setting because it belongs to another branch of the search space."""
_BELOW = -0.14
_MOST_TICKS = 6


Scale = tuple[list[float], tuple[tuple[float, str], ...]]


class Rule(NamedTuple):
    """One axis of the plot: its name, and ticks as (position from 0 to 1, text)."""

    name: str
    ticks: tuple[tuple[float, str], ...]


class Thread(NamedTuple):
    """One trial: its position on every axis, and its quality `share`, from 0 (worst) to 1 (best)."""

    number: int
    places: tuple[float, ...]
    share: float
    text: str


class ParallelInfo(NamedTuple):
    """Axes and lines of the plot; the last axis is the objective, and `best` is (number, value) of the best trial."""

    objective: str
    rules: tuple[Rule, ...]
    threads: tuple[Thread, ...]
    chosen: int | None
    best: tuple[int, float] | None


def parallel_info(
    trials: Sequence[TrialInfo], space: Space, *, objective: str = "loss", chosen: int | None = None
) -> ParallelInfo:
    """Place the complete trials on one axis for each setting that differs among them, and one for the objective."""
    done = [trial for trial in trials if trial.state == "complete" and objective in trial.values]
    told = [settings_of(trial) for trial in done]
    names = [
        name for name in dict.fromkeys(n for one in told for n in one) if len({o.get(name) for o in told}) > 1
    ]
    numbers = [_numbers(trial) for trial in done]
    scales = [
        _scale([n.get(name) for n in numbers], [o.get(name) for o in told], is_log=_is_log(name, space))
        for name in names
    ]
    values = [trial.values[objective] for trial in done]
    ends = _heights(values, objective)
    rules = (
        *(Rule(name, ticks) for name, (_, ticks) in zip(names, scales, strict=True)),
        Rule(objective, ends[1]),
    )
    threads = tuple(
        Thread(
            trial.number, (*(places[at] for places, _ in scales), ends[0][at]), 1 - ends[0][at], _text(trial)
        )
        for at, trial in enumerate(done)
    )
    best = min(zip(values, (trial.number for trial in done), strict=True), default=None)
    return ParallelInfo(objective, rules, threads, chosen, None if best is None else (best[1], best[0]))


def _numbers(trial: TrialInfo) -> dict[str, float]:
    return {
        short_name(name): float(value)
        for name, value in trial.params
        if isinstance(value, int | float) and not isinstance(value, bool)
    }


def _is_log(name: str, space: Space) -> bool:
    own = [parameter for full, parameter in space.parameters.items() if short_name(full) == name]
    return any(isinstance(one, PowersOfTwo) or (isinstance(one, Between) and one.log) for one in own)


def _scale(numbers: Sequence[float | None], texts: Sequence[str | None], *, is_log: bool) -> Scale:
    """Return each value's position and the axis ticks; text and small sets of distinct numbers are evenly spaced."""
    has_words = any(n is None and t is not None for n, t in zip(numbers, texts, strict=True))
    apart = len({n for n in numbers if n is not None})
    places, ticks = (
        _by_order(numbers, texts)
        if has_words or apart <= _MOST_TICKS
        else _by_size(numbers, is_log, value_text)
    )
    return places, (*ticks, (_BELOW, NOT_DRAWN)) if _BELOW in places else ticks


def _heights(values: Sequence[float], objective: str) -> Scale:
    """Return positions and ticks for the objective's axis, with the lowest value at the bottom."""

    def text(value: object) -> str:
        return objective_text(objective, float(str(value)))

    return _by_size(values, is_wide(values), text) if len(set(values)) > 1 else ([0.0] * len(values), ())


def _by_size(numbers: Sequence[float | None], is_log: bool, text: Callable[[object], str]) -> Scale:
    known = [n for n in numbers if n is not None]
    is_log &= min(known) > 0
    at, back = (log10, lambda size: 10**size) if is_log else (float, float)
    low, high = at(min(known)), at(max(known))
    places = [_BELOW if n is None else (at(n) - low) / (high - low) for n in numbers]
    return places, tuple((part, text(float(back(low + part * (high - low))))) for part in (0.0, 0.5, 1.0))


def _by_order(numbers: Sequence[float | None], texts: Sequence[str | None]) -> Scale:
    known = {(n or 0.0, t) for n, t in zip(numbers, texts, strict=True) if t is not None}
    spots = {text: place / max(1, len(known) - 1) for place, (_, text) in enumerate(sorted(known))}
    places = [_BELOW if text is None else spots[text] for text in texts]
    return places, tuple((place, text) for text, place in spots.items())


def _text(trial: TrialInfo) -> str:
    values = [f"{title_of(name)} {objective_text(name, value)}" for name, value in trial.values.items()]
    settings = [f"{name} {value}" for name, value in settings_of(trial).items()]
    return "<br>".join([f"<b>trial {trial.number}</b>", *map(safe, [*settings, *values])])


def parallel_text(info: ParallelInfo) -> str:
    """Return sentences that explain the lines and name the best trial."""
    if info.best is None or len(info.rules) < 2:
        return "A line appears for each complete trial, once two of them differ."
    number, value = info.best
    return (
        f"{plural(len(info.threads), 'trial')}, each a line from its settings to its {title_of(info.objective)}; green "
        f"is best and yellow worst. The best is trial {number}, with {objective_text(info.objective, value)}."
    )


def parallel_spec(info: ParallelInfo) -> Spec:
    """Return the lines as Plotly JSON: one trace per colour, the best trials on top."""
    layout = _layout(info)
    if info.best is None or len(info.rules) < 2:
        return {"data": [], "layout": layout}
    last = len(WORST_TO_BEST) - 1
    shades: dict[int, list[Thread]] = {}
    for one in info.threads:
        if one.number != info.chosen:
            shades.setdefault(round(one.share * last), []).append(one)
    lines = [
        _lines(shades[shade], {"color": WORST_TO_BEST[shade], "width": 1.3 + 1.2 * (shade / last) ** 3})
        for shade in sorted(shades)
    ]
    chosen = [one for one in info.threads if one.number == info.chosen]
    return {
        "data": [*lines, *([_lines(chosen, {"color": CHOSEN, "width": 3})] if chosen else [])],
        "layout": layout,
    }


def parallel(trials: Sequence[TrialInfo], space: Space, *, objective: str = "loss") -> go.Figure:
    """Draw each complete trial as a line through its settings to the objective."""
    return go.Figure(parallel_spec(parallel_info(trials, space, objective=objective)))


def _lines(threads: Sequence[Thread], line: Spec) -> Spec:
    return {
        "type": "scatter", "mode": "lines+markers", "line": line, "marker": {"size": 6}, "connectgaps": False,
        "x": [at for one in threads for at in (*range(len(one.places)), None)],
        "y": [place for one in threads for place in (*one.places, None)],
        "customdata": [one.number for one in threads for _ in range(len(one.places) + 1)],
        "text": [one.text for one in threads for _ in range(len(one.places) + 1)],
        "hovertemplate": "%{text}<extra></extra>",
    }  # fmt: skip


def _layout(info: ParallelInfo) -> Spec:
    count = len(info.rules)
    ticks = [
        theme.note(safe(text), x=at, y=place)
        | {
            "xref": "x",
            "yref": "y",
            "yanchor": "middle",
            "xshift": 6,
            "font": {"size": 11, "color": theme.GREY},
        }
        for at, rule in enumerate(info.rules)
        for place, text in rule.ticks
    ]
    bar = {"type": "line", "y0": 0, "y1": 1, "line": {"color": theme.AXIS, "width": 1.4}, "layer": "below"}
    bars = [bar | {"x0": at, "x1": at} for at in range(count)]
    names = [
        f"<b>{safe(rule.name)}</b>" if at == count - 1 else safe(rule.name)
        for at, rule in enumerate(info.rules)
    ]
    across: Spec = {
        "side": "top",
        "tickvals": list(range(count)),
        "ticktext": names,
        "range": [-0.1, count - 0.55],
    }
    low = _BELOW - 0.08 if any(_BELOW in one.places for one in info.threads) else -0.08
    return theme.look(height=320, margin={"l": 8, "r": 8, "t": 30, "b": 8}, showlegend=False) | {
        "xaxis": theme.axis(showgrid=False, showline=False, **across),
        "yaxis": theme.axis(showgrid=False, showticklabels=False, showline=False, range=[low, 1.08]),
        "annotations": ticks if count > 1 else [], "shapes": bars if count > 1 else [],
    }  # fmt: skip
