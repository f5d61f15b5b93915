"""The value of a learning-rate schedule at a step, in plain Python.

The trainer sets ``group["lr"] = base_lr * multiplier(schedule, step, total_steps)`` before each step. Nothing
is kept between steps, so a resumed run needs no scheduler state.
"""

from __future__ import annotations

import math

from shardscope.spec.schedule import Schedule


def multiplier(schedule: Schedule, step: int, total_steps: int) -> float:
    """The factor on the learning rate at one step.

    The warm-up ends at full rate in step `warmup_steps`. A falling (or rising) shape starts at full rate in the step
    after, and would reach `final_ratio` one step past the last, so that no step is spent at a rate of zero.

    Args:
        schedule: The shape.
        step: The step about to be taken, counted from 1.
        total_steps: Steps in the whole run; steps beyond them stay at the final value.

    Example:
        >>> [multiplier(Schedule("linear", warmup_steps=2), step, 6) for step in range(1, 7)]
        [0.5, 1.0, 1.0, 0.75, 0.5, 0.25]
    """
    warmup = schedule.warmup_steps
    if step <= warmup:
        return step / warmup
    if schedule.name == "sqrt":
        return math.sqrt(max(warmup, 1) / step)
    progress = min((step - 1 - warmup) / max(total_steps - warmup, 1), 1.0)
    floor = schedule.settings.get("final_ratio", 1.0)
    if schedule.name == "exponential":
        return float(floor**progress)
    return float(floor + (1 - floor) * _remaining(schedule, progress))


def _remaining(schedule: Schedule, progress: float) -> float:
    """How much of the way down is left, from 1 at progress 0 to 0 at progress 1."""
    if schedule.name == "cosine":
        return (1 + math.cos(math.pi * progress)) / 2
    power: float = schedule.settings.get("power", 1.0)
    return float((1.0 - progress) ** power)
