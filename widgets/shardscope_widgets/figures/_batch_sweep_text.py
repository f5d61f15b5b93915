"""Sentences on a large-batch sweep: the limit of each optimizer, the target, and the time that larger batches save."""

from __future__ import annotations

from shardscope.tuning.sweep_result import TARGET_MARGIN
from shardscope_widgets.figures._batch_sweep import QUALITY_WORDS, SweepInfo
from shardscope_widgets.words import duration_text, listed

_FEW_STEPS = 10
"""With fewer steps, warm-up and decay leave hardly a step at the chosen learning rate."""


def batch_sweep_text(info: SweepInfo) -> str:
    """Return a line for each finding: the largest batch size and the time it saves first, then what limits it."""
    answer = " ".join(filter(None, (_largest(info), _layerwise(info))))
    lines = (
        answer, _reached(info), _time(info), _critical(info), _target_rule(info), _narrow(info), *_open_limits(info),
        *_few_steps(info),
    )  # fmt: skip
    return "\n".join(line for line in lines if line)


def _largest(info: SweepInfo) -> str:
    """Return which batch size is the largest that reaches the target, and with which optimizers."""
    most = max((line.largest for line in info.lines if line.largest is not None), default=None)
    if most is None:
        return ""
    names = listed(line.optimizer for line in info.lines if line.largest == most)
    tried = max(batch for line in info.lines for batch in line.batches)
    end = f"the next larger one, {tried}, misses it" if tried > most else "no larger one was tried"
    return f"The largest batch size that reaches the target is {most}, with {names}; {end}."


def _reached(info: SweepInfo) -> str:
    reached = [f"{line.optimizer} up to {line.largest}" for line in info.lines if line.largest is not None]
    never = [line.optimizer for line in info.lines if line.largest is None]
    said = f"Within the same number of epochs, a {QUALITY_WORDS[info.quality]} of {info.target:.3g} is reached by "
    said += listed(reached) if reached else "none of the optimizers at any of these batch sizes"
    return f"{said}{f'; not by {listed(never)}' if reached and never else ''}."


def _target_rule(info: SweepInfo) -> str:
    source = info.target_from
    if source is None:
        return ""
    return (
        f"This target is {TARGET_MARGIN:g} times {source.median:.3g}, the highest {QUALITY_WORDS[info.quality]} at "
        f"batch size {source.batch} (that of {source.optimizer}), so that each of them can reach it there, and "
        "differences between seeds matter little."
    )


def _narrow(info: SweepInfo) -> str:
    """Name the limits where the median misses the target, but at least one seed reaches it."""
    first_missed = [(line, line.num_reached) for line in info.lines if line.num_reached < len(line.batches)]
    narrow = [
        f"{line.optimizer} at {line.batches[place]} ({line.medians[place]:.3g})"
        for line, place in first_missed
        if (low := line.lows[place]) is not None and low <= info.target and line.medians[place] is not None
    ]
    return f"Narrowly missed, because one seed or more reach it: {listed(narrow)}." if narrow else ""


def _layerwise(info: SweepInfo) -> str:
    layerwise = [line for line in info.lines if line.is_layerwise]
    others = [line.largest or 0 for line in info.lines if not line.is_layerwise]
    if not layerwise or not others:
        return ""
    better = [line.optimizer for line in layerwise if (line.largest or 0) > max(others)]
    if better:
        return f"{listed(better)} reached it at a larger batch size than the others."
    names = listed(line.optimizer for line in layerwise)
    do_not = "does not" if len(layerwise) == 1 else "do not"
    return f"{names} {do_not} reach it at a larger batch size than the best of the others."


def _open_limits(info: SweepInfo) -> list[str]:
    return [
        f"At batch size {line.batches[line.num_reached]}, the best rate of {line.optimizer} is the {line.edge} tried, "
        "so its limit may be higher."
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
    if place + 1 < line.num_reached:
        return f"{said}. Larger batches save no more time."
    return f"{said}. Up to there, a larger batch saves time, so the loss of quality sets the limit."


def _critical(info: SweepInfo) -> str:
    most = max((line.largest for line in info.lines if line.largest is not None), default=None)
    if info.critical_batch is None or most is None:
        return ""
    critical = f"{info.critical_batch:.0f}"
    return (
        f"The critical batch size, {critical}, is a different limit: from about {critical} on, more samples per step "
        f"save fewer and fewer steps; {most} is the largest batch size at which these epochs still have enough steps "
        "for the target."
    )


def _few_steps(info: SweepInfo) -> list[str]:
    steps = {b: n for line in info.lines for b, n in zip(line.batches, line.steps, strict=True)}
    return [
        f"At batch size {batch}, a run has only {number} steps, so its {QUALITY_WORDS[info.quality]} says little."
        for batch, number in sorted(steps.items())
        if number < _FEW_STEPS
    ]
