"""Changes of the number of ranks in a run: when they happened, and how long no rank trained."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from shardscope.runlog.steps import Steps


class Resize(NamedTuple):
    """One change of the number of ranks.

    Attributes:
        step: First step that the new ranks took.
        before: Number of ranks before it.
        after: Number of ranks from this step on.
        pause_s: Time from the end of the step before to the start of this one, in seconds.
    """

    step: int
    before: int
    after: int
    pause_s: float


def resizes_of(steps: Steps) -> list[Resize]:
    """Return the changes of the number of ranks in a run.

    Example:
        >>> from shardscope.runlog.steps import Step
        >>> resizes_of(Steps([Step(1, t=1.0, world_size=2), Step(2, t=4.0, step_time_s=1.0, world_size=3)]))
        [Resize(step=2, before=2, after=3, pause_s=2.0)]
    """
    sizes = np.asarray(steps.column("world_size"))
    changed = np.flatnonzero(sizes[1:] != sizes[:-1])
    return [
        Resize(new.number, old.world_size, new.world_size, max(0.0, new.t - new.step_time_s - old.t))
        for old, new in ((steps[int(at)], steps[int(at) + 1]) for at in changed)
    ]


def sizes_text(log_resizes: list[Resize]) -> str | None:
    """Return the numbers of ranks in order, such as ``2 → 4 → 3``; None if there was only one.

    Example:
        >>> sizes_text([Resize(10, 2, 4, 0.5), Resize(20, 4, 3, 0.5)])
        '2 → 4 → 3'
    """
    if not log_resizes:
        return None
    return " → ".join(map(str, [log_resizes[0].before, *(each.after for each in log_resizes)]))
