"""Changes of the number of ranks in a run: their steps, the time in which no rank trained, and the source of the
state.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from shardscope.runlog.restarts import Restart
from shardscope.runlog.steps import Step, Steps


class Resize(NamedTuple):
    """One change of the number of ranks.

    Attributes:
        step: First step that the new ranks took.
        before: Number of ranks before this step.
        after: Number of ranks from this step on.
        pause_s: Time in which no rank trained, in seconds: from the end of the previous step (after a failure, from
            when the agent noticed it) to the start of this step.
        source: Source of the new ranks' state: ``"replica"``, a copy in the host's memory, or ``"disk"``; None if
            unknown, as in runs of earlier versions.
        is_failure: Whether ranks were lost, and a restart continued without them; otherwise, the number was changed on
            purpose.
    """

    step: int
    before: int
    after: int
    pause_s: float
    source: str | None = None
    is_failure: bool = False


class Pause(NamedTuple):
    """Time in which no rank trained while the number of ranks changed.

    The pause is stored when the first step after it has finished, because a restart may repeat that step later.
    """

    seconds: float
    is_failure: bool

    @classmethod
    def before_last(cls, steps: Steps, restarts: Sequence[Restart]) -> Pause:
        """Return the pause before the newest step, the first step after the number of ranks changed."""
        failed = restarts[-1] if restarts and restarts[-1].recovered_t is None else None
        if failed is None:
            return cls.between(steps[-2], steps[-1])
        return cls(max(0.0, steps[-1].t - steps[-1].step_time_s - failed.failed_t), is_failure=True)

    @classmethod
    def between(cls, before: Step, after: Step) -> Pause:
        """Return the pause between two steps, if ranks were not lost."""
        return cls(max(0.0, after.t - after.step_time_s - before.t), is_failure=False)


def resizes_of(
    steps: Steps, pauses: Mapping[int, Pause], sources: Mapping[int, str] | None = None
) -> list[Resize]:
    """Return the changes of the number of ranks in a run.

    Args:
        steps: The finished steps.
        pauses: The pause before each step whose number of ranks differs from the previous step's, by step; if one is
            missing, the time between the two steps is used.
        sources: Source of the state from which a changed number of ranks resumed, by the step after which it was saved.

    Example:
        >>> from shardscope.runlog.steps import Step
        >>> steps = Steps([Step(1, t=1.0, world_size=2), Step(2, t=4.0, step_time_s=1.0, world_size=3)])
        >>> resizes_of(steps, {2: Pause.before_last(steps, [])})
        [Resize(step=2, before=2, after=3, pause_s=2.0, source=None, is_failure=False)]
    """
    sizes = np.asarray(steps.column("world_size"))
    changed = np.flatnonzero(sizes[1:] != sizes[:-1])
    known = sources or {}
    found = []
    for old, new in ((steps[int(at)], steps[int(at) + 1]) for at in changed):
        pause = pauses.get(new.number) or Pause.between(old, new)
        found.append(
            Resize(
                new.number,
                old.world_size,
                new.world_size,
                pause.seconds,
                known.get(old.number),
                pause.is_failure,
            )
        )
    return found


def sizes_text(log_resizes: list[Resize]) -> str | None:
    """Return all numbers of ranks in order, such as ``2 → 4 → 3``; None if the number never changed.

    Example:
        >>> sizes_text([Resize(10, 2, 4, 0.5), Resize(20, 4, 3, 0.5)])
        '2 → 4 → 3'
    """
    if not log_resizes:
        return None
    return " → ".join(map(str, [log_resizes[0].before, *(each.after for each in log_resizes)]))
