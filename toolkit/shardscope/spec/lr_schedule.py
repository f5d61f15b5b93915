"""Learning-rate schedules: how the learning rate changes over the steps of a run."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, final

from pydantic import BeforeValidator, SerializeAsAny

from shardscope.spec.method import Method, required
from shardscope.spec.numbers import CountOrZero


class LRSchedule(Method):
    """A factor that multiplies the learning rate at every step: a linear warm-up, then the curve of the schedule.

    Derive your own schedule from this class: give it a `name`, its settings as fields with defaults, and
    `factor_after_warmup`. A schedule must not keep state between steps, so that a resumed run has nothing to restore.

    Example:
        >>> LRSchedule("polynomial", warmup_steps=10).power
        2.0
        >>> [LRSchedule("linear", warmup_steps=2).factor(step, 6) for step in range(1, 7)]
        [0.5, 1.0, 1.0, 0.75, 0.5, 0.25]
    """

    kind = "lr_schedule"
    folder = "lr_schedules"

    warmup_steps: CountOrZero = 0
    """Number of warm-up steps, in which the learning rate rises linearly to its full value. 0 to all steps."""

    if TYPE_CHECKING:

        def __init__(self, name: str, **settings: Any) -> None: ...

    @final
    def factor(self, step: int, steps: int) -> float:
        """Return the factor that multiplies the learning rate at one step.

        Args:
            step: Number of the step, from 1.
            steps: Number of steps in the whole run.
        """
        if step <= self.warmup_steps:
            return step / self.warmup_steps
        return float(self.factor_after_warmup(step, steps))

    @required
    def factor_after_warmup(self, step: int, steps: int) -> float:
        """Return the factor at a step after the warm-up; 1 is the full learning rate. `step` may be beyond `steps`.

        Args:
            step: Number of the step, from 1.
            steps: Number of steps in the whole run.
        """
        raise NotImplementedError

    def progress(self, step: int, steps: int) -> float:
        """Return the fraction of the steps after the warm-up that are finished before `step`.

        It is 0 at the first step after the warm-up, and less than 1 at the last step, so that no step has a learning
        rate of zero. Beyond the last step it stays at 1.
        """
        return min((step - 1 - self.warmup_steps) / max(steps - self.warmup_steps, 1), 1.0)


AnyLRSchedule = Annotated[SerializeAsAny[LRSchedule], BeforeValidator(LRSchedule.resolve)]
"""A field that accepts a schedule, its name, its class or its JSON."""
