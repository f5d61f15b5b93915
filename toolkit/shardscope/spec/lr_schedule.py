"""Learning-rate schedules: how the learning rate moves over the steps of a run."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, final

from pydantic import BeforeValidator, SerializeAsAny

from shardscope.spec.method import Method, required
from shardscope.spec.numbers import CountOrZero


class LRSchedule(Method):
    """The learning rate over a run, as a factor on the optimizer's own: a linear warm-up, then what the schedule says.

    Derive a schedule of your own from this class: give it a `name`, its settings as fields with defaults, and
    `factor_after_warmup`. Nothing may be kept between steps, so that a resumed run needs no state of it.

    Example:
        >>> LRSchedule("polynomial", warmup_steps=10).power
        2.0
        >>> [LRSchedule("linear", warmup_steps=2).factor(step, 6) for step in range(1, 7)]
        [0.5, 1.0, 1.0, 0.75, 0.5, 0.25]
    """

    kind = "lr_schedule"
    folder = "lr_schedules"

    warmup_steps: CountOrZero = 0
    """Steps over which the rate first rises, linearly, to its full value. At least 0, at most all steps."""

    if TYPE_CHECKING:

        def __init__(self, name: str, **settings: Any) -> None: ...

    @final
    def factor(self, step: int, steps: int) -> float:
        """The factor on the learning rate at one step.

        Args:
            step: The step about to be taken, counted from 1.
            steps: Steps in the whole run.
        """
        if step <= self.warmup_steps:
            return step / self.warmup_steps
        return float(self.factor_after_warmup(step, steps))

    @required
    def factor_after_warmup(self, step: int, steps: int) -> float:
        """The factor at a step after the warm-up, which ends at full rate; `step` may lie beyond `steps`.

        Args:
            step: The step about to be taken, counted from 1.
            steps: Steps in the whole run.
        """
        raise NotImplementedError

    def progress(self, step: int, steps: int) -> float:
        """How far a run is between the end of its warm-up and its end: 0 in the first step after the warm-up.

        The last step is one short of 1, so that no step is spent at a rate of zero; later ones stay at 1.
        """
        return min((step - 1 - self.warmup_steps) / max(steps - self.warmup_steps, 1), 1.0)


AnyLRSchedule = Annotated[SerializeAsAny[LRSchedule], BeforeValidator(LRSchedule.resolve)]
"""A field that takes a schedule, its name, its class or its JSON."""
