"""Sentences on a large-batch sweep: the answer, the target, and what limits each optimizer, in this order."""

from __future__ import annotations

from shardscope.tuning.sweep_result import TARGET_MARGIN
from shardscope_widgets.figures._batch_sweep import QUALITY_WORDS, SweepInfo, SweepLine
from shardscope_widgets.words import duration_text, listed

_FEW_STEPS = 10
"""With fewer steps, warm-up and decay leave hardly a step at the chosen learning rate."""


def batch_sweep_text(info: SweepInfo) -> str:
    """Return Markdown: the answer in bold, then a list with a line for each finding."""
    reasons = (
        _target(info), _reached(info), _untested(info), _narrow(info), _time(info), batch_limits_text(info),
        *_open_limits(info), *_few_steps(info),
    )  # fmt: skip
    return "\n".join([f"**{_answer(info)}**\n", *(f"- {reason}" for reason in reasons if reason)])


def batch_limits_text(info: SweepInfo) -> str:
    """Return a sentence on each of the two limits of the batch size; empty if one of them is unknown."""
    most = _most(info)
    if info.critical_batch is None or most is None:
        return ""
    return (
        f"The critical batch size, {info.critical_batch:.0f}, says up to where a larger batch saves steps almost in "
        f"proportion. The largest batch size that reached the target, {most}, says up to where {info.num_samples:,} "
        "samples still make enough steps to get there."
    )


def _most(info: SweepInfo) -> int | None:
    return max((line.largest for line in info.lines if line.largest is not None), default=None)


def _answer(info: SweepInfo) -> str:
    """Return up to which batch size the target is reached, and whether layer-wise optimizers reach it further."""
    most = _most(info)
    if most is None:
        return "None of the optimizers reaches the target at any of the batch sizes tried."
    said = f"The batch can grow to {most} before the target is missed"
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
    """Return an optimizer's accuracy at its smallest, largest and first missed batch size; empty if unknown."""
    places = dict.fromkeys([0, line.num_reached - 1, min(line.num_reached, len(line.batches) - 1)])
    known = [(line.batches[n], line.accuracies[n]) for n in places]
    told = [f"{accuracy:.1%} at {batch}" for batch, accuracy in known if accuracy is not None]
    return f" Validation accuracy of {line.optimizer}: {listed(told)}." if told else ""


def _beside(line: SweepLine, rival: str, best: int) -> str:
    """Return how a layer-wise optimizer compares with the best of the others, as a predicate."""
    if line.largest is None:
        return "misses it at every size tried"
    if line.largest == best:
        return f"ties {rival} at {best}"
    return f"reaches {line.largest}, {rival} {best}" if line.largest > best else f"stops at {line.largest}"


def _verdict(layerwise: list[SweepLine], best: int) -> str:
    better = [line.optimizer for line in layerwise if (line.largest or 0) > best]
    if better:
        return f"{listed(better)} {'helps' if len(better) == 1 else 'help'} here"
    return {1: "it does not help here", 2: "neither helps here"}.get(
        len(layerwise), "none of them helps here"
    )


def _target(info: SweepInfo) -> str:
    source, word = info.target_from, QUALITY_WORDS[info.quality]
    said = f"The target: a {word} of {info.target:.3g} or less, after {info.num_samples:,} samples at every batch size"
    if source is None:
        return f"{said}."
    return (
        f"{said}. It is {TARGET_MARGIN:g} times {source.median:.3g}, the highest {word} at batch size {source.batch} "
        f"(that of {source.optimizer}), so that every optimizer starts from a size that reaches it."
    )


def _reached(info: SweepInfo) -> str:
    reached = [f"{line.optimizer} up to {line.largest}" for line in info.lines if line.largest is not None]
    never = [line.optimizer for line in info.lines if line.largest is None]
    said = f"It is reached by {listed(reached)}" if reached else ""
    return f"{said}{f'; not by {listed(never)}' if reached and never else ''}." if said else ""


def _untested(info: SweepInfo) -> str:
    """Return what lies between the last size reached and the first missed, and why larger ones were not run."""
    most = _most(info)
    tried = max(batch for line in info.lines for batch in line.batches)
    if most is None:
        return ""
    if most == tried:
        return f"Batch sizes above {tried} were not tested, so the limit may be higher."
    missed = min(b for line in info.lines for b in line.batches if b > most)
    said = (
        f"Between {most} and {missed}, no size was tested, so the limit lies somewhere between the two. An optimizer "
        "stops after the first size that it misses"
    )
    beyond = [str(batch) for batch in info.batches if batch > tried]
    if not beyond:
        return f"{said}."
    return f"{said}, so {listed(beyond)} {'was' if len(beyond) == 1 else 'were'} not run."


def _narrow(info: SweepInfo) -> str:
    """Name the points where some seeds reach the target and others miss it."""
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
    return f"{said}. Larger batches save no more time." if place + 1 < line.num_reached else f"{said}."


def _few_steps(info: SweepInfo) -> list[str]:
    steps = {b: n for line in info.lines for b, n in zip(line.batches, line.steps, strict=True)}
    return [
        f"At batch size {batch}, a run has only {number} steps, so its {QUALITY_WORDS[info.quality]} says little."
        for batch, number in sorted(steps.items())
        if number < _FEW_STEPS
    ]
