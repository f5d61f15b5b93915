"""Large-batch sweep: quality after the same number of samples, and training time, of each optimizer by batch size."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import plotly.graph_objects as go

from shardscope.spec import Optimizer, registry
from shardscope.spec.look import YOUR_OWN, MethodStyle
from shardscope.tuning.sweep_result import TARGET_MARGIN, BatchSweep, SweepPoint
from shardscope_widgets.figures import theme
from shardscope_widgets.figures._front import log_ticks
from shardscope_widgets.words import duration_text, listed

_APART = 1.025
"""Factor by which the x positions of successive optimizers' points differ, so that they do not overlap."""
_TARGET = "#d1495b"
_LEFT, _RIGHT = [0.0, 0.52], [0.6, 1.0]
QUALITY_WORDS = {"loss": "validation loss", "error": "validation error"}
_FEW_STEPS = 10
"""Number of steps below which warm-up and decay leave hardly any steps at the chosen learning rate."""


class SweepLine(NamedTuple):
    """One optimizer's line: median, lowest and highest quality over seeds at each batch size, and training time.

    `medians` is None where most seeds failed; `lows` and `highs` are None where all seeds failed. `seconds` is the
    training time of a run, None if it was not measured. `largest` is the largest batch size that reaches the target;
    None if there is none. `edge` is ``lowest`` or ``highest`` if the best rate at the first batch size that misses the
    target is the lowest or highest rate tried. `accuracies` are median fractions of correct answers on the validation
    split, None where they are unknown; `straddles` is true where some seeds reach the target and other seeds do not.
    `is_layerwise` is true of optimizers such as LAMB and LARS.
    """

    optimizer: str
    batches: tuple[int, ...]
    steps: tuple[int, ...]
    medians: tuple[float | None, ...]
    lows: tuple[float | None, ...]
    highs: tuple[float | None, ...]
    seconds: tuple[float | None, ...]
    hover: tuple[str, ...]
    largest: int | None
    edge: str | None
    is_layerwise: bool
    accuracies: tuple[float | None, ...]
    straddles: tuple[bool, ...]

    @property
    def num_reached(self) -> int:
        """Number of batch sizes that reach the target, from the smallest on."""
        return 0 if self.largest is None else self.batches.index(self.largest) + 1


class SweepInfo(NamedTuple):
    """The lines of all optimizers, the target quality and its origin, and the critical batch size if it is known.

    `num_samples` is the number of samples that every run trains on; `batches` are all requested sizes.
    """

    quality: str
    target: float
    lines: tuple[SweepLine, ...]
    num_seeds: int
    target_from: SweepPoint | None
    critical_batch: float | None
    num_samples: int
    batches: tuple[int, ...]


def batch_sweep_info(sweep: BatchSweep, *, critical_batch: float | None = None) -> SweepInfo:
    """Return the data of the chart for a sweep.

    Args:
        sweep: Result of ``shardscope.batch_sweep``.
        critical_batch: Critical batch size, in samples, measured from the gradient noise of the same job.
    """
    names = dict.fromkeys(point.optimizer for point in sweep.points)
    return SweepInfo(
        sweep.quality, sweep.target, tuple(_line(sweep, name) for name in names),
        max(point.num_seeds for point in sweep.points), sweep.target_from, critical_batch,
        sweep.num_samples, sweep.batches,
    )  # fmt: skip


def _line(sweep: BatchSweep, name: str) -> SweepLine:
    points = sorted((p for p in sweep.points if p.optimizer == name), key=lambda p: p.batch)
    optimizer = registry.find(Optimizer, name)
    return SweepLine(
        name,
        tuple(p.batch for p in points),
        tuple(p.steps for p in points),
        tuple(p.median if math.isfinite(p.median) else None for p in points),
        tuple(min(p.values, default=None) for p in points),
        tuple(max(p.values, default=None) for p in points),
        tuple(p.seconds for p in points),
        tuple(_hover(p) for p in points),
        sweep.largest(name),
        next((p.edge for p in points if not p.reaches(sweep.target)), None),
        optimizer is not None and optimizer.without_ratios is not None,
        tuple(p.accuracy for p in points),
        tuple(p.straddles(sweep.target) for p in points),
    )


def _hover(point: SweepPoint) -> str:
    failed = point.num_seeds - len(point.values)
    seeds = ", ".join(f"{value:.4g}" for value in point.values) or "none"
    time = "" if point.step_s is None else f" of {duration_text(point.step_s)}"
    accuracy = "" if point.accuracy is None else f"accuracy {point.accuracy:.1%}<br>"
    tried = f", {point.edge or 'inside'} of {len(point.rates)} tried" if len(point.rates) > 1 else ""
    return (
        f"{accuracy}{point.steps} steps{time}<br>rate {point.rate:.3g}{tried}<br>seeds: {seeds}"
        f"{f'; {failed} failed' if failed else ''}"
    )


def draw_batch_sweep(info: SweepInfo) -> go.Figure:
    """Draw quality (median over seeds, whiskers to the lowest and highest) on the left, training time on the right."""
    figure = go.Figure()
    for place, line in enumerate(info.lines):
        beside = _APART ** (place - (len(info.lines) - 1) / 2)
        figure.add_traces([_trace(line, beside=beside), _time_trace(line, beside=beside)])
    highs = [high for line in info.lines for high in line.highs if high is not None]
    lows = [low for line in info.lines for low in line.lows if low is not None]
    seconds = [time for line in info.lines for time in line.seconds if time is not None]
    is_log = min([info.target, *lows]) > 0  # errors may be 0
    batches = sorted({batch for line in info.lines for batch in line.batches})
    sizes = {"type": "log", "tickvals": batches, "ticktext": [str(b) for b in batches]}
    note = "one seed" if info.num_seeds == 1 else f"median and range of {info.num_seeds} seeds"
    figure.update_layout(
        xaxis=theme.axis("batch size, samples", domain=_LEFT, anchor="y", **sizes),
        yaxis=theme.axis("", anchor="x", **({"type": "log"} | _ticks([info.target, *lows, *highs]) if is_log else {})),
        xaxis2=theme.axis("batch size, samples", domain=_RIGHT, anchor="y2", matches="x", **sizes),
        yaxis2=theme.axis("", anchor="x2", type="log", **_ticks(seconds)),
        shapes=[
            *([theme.rule(_TARGET, y=info.target, along="x domain", width=1.4, dash="dot")]
              if math.isfinite(info.target) else []),
            *_critical_rules(info),
        ],
        annotations=[
            theme.heading(QUALITY_WORDS[info.quality].capitalize(), note, x=_LEFT[0]),
            theme.heading("Seconds of training", "open: target missed", x=_RIGHT[0]),
            *([_target_name(info.target, is_log=is_log)] if math.isfinite(info.target) else []),
            *_critical_name(info),
        ],
        showlegend=True,
    )  # fmt: skip
    return theme.style(figure, height=436, head=94)


def _critical_rules(info: SweepInfo) -> list[dict[str, Any]]:
    if info.critical_batch is None:
        return []
    return [
        theme.rule(theme.GREY, x=info.critical_batch, axis=axis, along=f"y{axis} domain", width=1.2)
        for axis in ("", "2")
    ]


def _critical_name(info: SweepInfo) -> list[dict[str, Any]]:
    if info.critical_batch is None:
        return []
    place = {"xref": "x2", "yref": "y2 domain", "xanchor": "left", "yanchor": "top", "xshift": 4}
    look = {"font": {"size": 11, "color": theme.GREY}}
    text = f"critical batch size, {info.critical_batch:.0f}"
    return [theme.note(text, x=math.log10(info.critical_batch), y=1) | place | look]


def _ticks(values: Sequence[float]) -> dict[str, Any]:
    known = [value for value in values if math.isfinite(value)]
    return log_ticks(min(known), max(known)) if known else {}


def _look(line: SweepLine) -> MethodStyle:
    optimizer = registry.find(Optimizer, line.optimizer)
    return optimizer.look if optimizer else YOUR_OWN


def _trace(line: SweepLine, *, beside: float) -> go.Scatter:
    """Return a line whose points are offset horizontally by the factor `beside`, so that whiskers do not overlap."""
    colour, dash, symbol = _look(line)
    ups = [_apart(high, middle) for high, middle in zip(line.highs, line.medians, strict=True)]
    downs = [_apart(middle, low) for middle, low in zip(line.medians, line.lows, strict=True)]
    return go.Scatter(
        x=[batch * beside for batch in line.batches], y=line.medians, name=line.optimizer,
        mode="lines+markers", connectgaps=False, legendgroup=line.optimizer,
        line={"color": colour, "dash": dash, "width": 2.2}, marker={"symbol": symbol, "size": 9, "color": colour},
        error_y={"type": "data", "array": ups, "arrayminus": downs, "color": colour, "thickness": 1.2, "width": 4},
        customdata=list(zip(line.hover, line.batches, strict=True)),
        hovertemplate=f"<b>{line.optimizer}</b> at batch %{{customdata[1]}}: %{{y:.4g}}<br>"
        "%{customdata[0]}<extra></extra>",
    )  # fmt: skip


def _time_trace(line: SweepLine, *, beside: float) -> go.Scatter:
    """Return the training time of a run by batch size; markers are open where the target is missed."""
    colour, dash, symbol = _look(line)
    symbols = [symbol if n < line.num_reached else f"{symbol}-open" for n in range(len(line.batches))]
    return go.Scatter(
        x=[batch * beside for batch in line.batches], y=line.seconds, name=line.optimizer, xaxis="x2", yaxis="y2",
        mode="lines+markers", connectgaps=False, legendgroup=line.optimizer, showlegend=False,
        line={"color": colour, "dash": dash, "width": 2.2}, marker={"symbol": symbols, "size": 9, "color": colour},
        customdata=list(zip(line.hover, line.batches, strict=True)),
        hovertemplate=f"<b>{line.optimizer}</b> at batch %{{customdata[1]}}: %{{y:.3s}}s<br>"
        "%{customdata[0]}<extra></extra>",
    )  # fmt: skip


def _apart(upper: float | None, lower: float | None) -> float | None:
    return None if upper is None or lower is None else max(0.0, upper - lower)


def _target_name(value: float, *, is_log: bool) -> dict[str, Any]:
    return {
        "text": "target", "xref": "x domain", "x": 0.01, "xanchor": "left", "yref": "y",
        "y": math.log10(value) if is_log else value, "yanchor": "bottom", "showarrow": False,
        "font": {"size": 11, "color": _TARGET},
    }  # fmt: skip


def batch_sweep(sweep: BatchSweep, *, critical_batch: float | None = None) -> go.Figure:
    """Draw each optimizer's quality after the same number of samples, and its training time, at each batch size.

    Args:
        sweep: Result of ``shardscope.batch_sweep``.
        critical_batch: Critical batch size, in samples, measured from the gradient noise of the same job; also drawn.
    """
    return draw_batch_sweep(batch_sweep_info(sweep, critical_batch=critical_batch))


def batch_sweep_text(info: SweepInfo) -> str:
    """Return Markdown: the answer in bold, then a list with a line for each finding."""
    reasons = (
        _target(info), _reached(info), _untested(info), _narrow(info), _time(info), batch_limits_text(info),
        *_open_limits(info), *_few_steps(info),
    )  # fmt: skip
    return "\n".join([f"**{_answer(info)}**\n", *(f"- {reason}" for reason in reasons if reason)])


def batch_limits_text(info: SweepInfo) -> str:
    """Return a sentence on which of the two limits of the batch size to use; empty if one of them is unknown."""
    most = _most(info)
    if info.critical_batch is None or most is None:
        return ""
    critical, steps = f"the critical batch size, {info.critical_batch:.0f}", _steps_by_batch(info)[most]
    if steps < _FEW_STEPS and info.critical_batch >= most:
        return (
            f"Sweep with more samples: {most}, the largest that reached the target, was tried with only {steps} steps, "
            f"which say little, and {critical}, is no smaller."
        )
    if steps < _FEW_STEPS:
        return (
            f"Use {critical}, up to which a larger batch saves steps almost in proportion: {most}, the largest that "
            f"reached the target, was tried with only {steps} steps, which say little."
        )
    why = (
        f"with more samples, batches up to {critical}, save steps almost in proportion"
        if most <= info.critical_batch
        else f"beyond {critical}, a larger batch saves fewer steps than in proportion"
    )
    use = f"Use {most} to train on {info.num_samples:,} samples"
    return f"{use}, the largest batch size that reached the target; {why}."


def _most(info: SweepInfo) -> int | None:
    return max((line.largest for line in info.lines if line.largest is not None), default=None)


def _answer(info: SweepInfo) -> str:
    """Return the largest batch size that reaches the target, and whether layer-wise optimizers extend that limit."""
    most = _most(info)
    if most is None:
        return "None of the optimizers reaches the target at any of the batch sizes tried."
    said = f"The batch can grow to {most} before the target is missed"
    steps = _steps_by_batch(info)[most]
    if steps < _FEW_STEPS:
        said += f", though runs of only {steps} steps at that size say little"
    lines = [line for line in info.lines if line.largest == most]
    accuracy = _accuracy(lines[0])
    layerwise = sorted((e for e in info.lines if e.is_layerwise), key=lambda e: -(e.largest or 0))
    others = [line for line in info.lines if not line.is_layerwise]
    best = max((line.largest or 0 for line in others), default=0)
    if not layerwise or not best:
        return f"{said}, with {listed(line.optimizer for line in lines)}.{accuracy}"
    rival = listed(line.optimizer for line in others if line.largest == best)
    parts = ", ".join(f"{line.optimizer} {_beside(line, rival, best)}" for line in layerwise)
    return f"{said}.{accuracy} {parts}: {_verdict(layerwise, best)}."


def _accuracy(line: SweepLine) -> str:
    """Return an optimizer's accuracy at its smallest and largest size that reaches the target and at its first miss."""
    places = dict.fromkeys([0, line.num_reached - 1, min(line.num_reached, len(line.batches) - 1)])
    known = [(line.batches[n], line.accuracies[n]) for n in places]
    told = [f"{accuracy:.1%} at {batch}" for batch, accuracy in known if accuracy is not None]
    return f" Validation accuracy of {line.optimizer}: {listed(told)}." if told else ""


def _beside(line: SweepLine, rival: str, best: int) -> str:
    """Return how a layer-wise optimizer compares with the best other optimizer, as a predicate of a sentence."""
    next_size = next(iter(line.batches[line.num_reached :]), None)
    is_open = next_size is not None and line.straddles[line.num_reached]
    also = f", with {next_size} too close to call" if is_open else ""
    if line.largest is None:
        return f"misses it at every size tried{also}"
    narrowly = "narrowly " if line.straddles[line.num_reached - 1] else ""
    if line.largest == best:
        return f"{narrowly}ties {rival} at {best}{also}"
    if line.largest > best:
        return f"{narrowly}reaches {line.largest} ({rival}: {best}){also}"
    return f"{narrowly}reaches {line.largest}{also}" if also or narrowly else f"stops at {line.largest}"


def _verdict(layerwise: list[SweepLine], best: int) -> str:
    better = [line for line in layerwise if (line.largest or 0) > best]
    clearly = [line.optimizer for line in better if not line.straddles[line.num_reached - 1]]
    if clearly:
        return f"{listed(clearly)} {'helps' if len(clearly) == 1 else 'help'} here"
    if better:
        return f"{listed(line.optimizer for line in better)} may help here"
    return {1: "it does not help here", 2: "neither helps here"}.get(
        len(layerwise), "none of them helps here"
    )


def _target(info: SweepInfo) -> str:
    source, word = info.target_from, QUALITY_WORDS[info.quality]
    said = f"The target: a {word} of {info.target:.3g} or less, after {info.num_samples:,} samples at every batch size"
    if source is None:
        return f"{said}."
    return (
        f"{said}. It is {TARGET_MARGIN:g} times the highest {word} at batch size {source.batch} ({source.median:.3g}, "
        f"with {source.optimizer}), so every optimizer reaches it at that size."
    )


def _reached(info: SweepInfo) -> str:
    reached = [f"{line.optimizer} up to {line.largest}" for line in info.lines if line.largest is not None]
    never = [line.optimizer for line in info.lines if line.largest is None]
    said = f"It is reached by {listed(reached)}" if reached else ""
    return f"{said}{f'; not by {listed(never)}' if reached and never else ''}." if said else ""


def _untested(info: SweepInfo) -> str:
    """Return which sizes around the limit were not tested, and why larger sizes were not run."""
    most = _most(info)
    tried = max(batch for line in info.lines for batch in line.batches)
    if most is None:
        return ""
    if most == tried:
        return f"Batch sizes above {tried} were not tested, so the limit may be higher."
    missed = min(b for line in info.lines for b in line.batches if b > most)
    said = (
        f"Between {most} and {missed}, no size was tested, so the limit lies somewhere between the two. "
        "The sweep of an optimizer ends at its first miss"
    )
    beyond = [str(batch) for batch in info.batches if batch > tried]
    if not beyond:
        return f"{said}."
    return f"{said}, so {listed(beyond)} {'was' if len(beyond) == 1 else 'were'} not run."


def _narrow(info: SweepInfo) -> str:
    """Return a sentence on the points where some seeds reach the target and other seeds miss it."""
    parts = []
    for word in ("reached", "missed"):
        names = [
            f"{line.optimizer} at {line.batches[n]}"
            for line in info.lines
            for n, straddles in enumerate(line.straddles)
            if straddles and (n < line.num_reached) is (word == "reached")
        ]
        parts += [f"narrowly {word} by {listed(names)}"] if names else []
    told = "; ".join(parts)
    return f"Too close to call, because the seeds lie on both sides of the target: {told}." if parts else ""


def _open_limits(info: SweepInfo) -> list[str]:
    return [
        f"At batch size {line.batches[line.num_reached]}, the best learning rate of {line.optimizer} is the "
        f"{line.edge} tried, so its limit may be higher."
        for line in info.lines
        if line.edge is not None
    ]  # fmt: skip


def _time(info: SweepInfo) -> str:
    """Return the fastest optimizer and batch size, and whether a larger batch still saves time there."""
    timed = [
        (seconds, line, place)
        for line in info.lines
        for place, seconds in enumerate(line.seconds[: line.num_reached])
        if seconds is not None
    ]
    if not timed:
        return ""
    seconds, line, place = min(timed, key=lambda one: one[0])
    said = (
        f"The fastest to the target is {line.optimizer} at {line.batches[place]}, in {duration_text(seconds)} of "
        f"training ({line.steps[place]} steps of {duration_text(seconds / line.steps[place])})"
    )
    first = line.seconds[0]
    if place and first is not None:
        said += (
            f"; at {line.batches[0]} it takes {duration_text(first)} ({line.steps[0]} steps of "
            f"{duration_text(first / line.steps[0])})"
        )
    return f"{said}. Larger batches are no faster." if place + 1 < line.num_reached else f"{said}."


def _steps_by_batch(info: SweepInfo) -> dict[int, int]:
    return {b: n for line in info.lines for b, n in zip(line.batches, line.steps, strict=True)}


def _few_steps(info: SweepInfo) -> list[str]:
    return [
        f"At batch size {batch}, a run has only {number} steps, so its {QUALITY_WORDS[info.quality]} says little."
        for batch, number in sorted(_steps_by_batch(info).items())
        if number < _FEW_STEPS
    ]
