"""The learning-rate range test: one real run whose learning rate rises exponentially until the loss explodes.

The test is from Smith 2015, Cyclical learning rates (arXiv 1506.01186), section 3.3; the exponential rise and the early
end are from fastai's ``lr_find``.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import takewhile
from math import isfinite
from pathlib import Path
from typing import TYPE_CHECKING

from shardscope.analytic.large_batch import RateSuggestions, smoothed_loss, suggest_rates
from shardscope.errors import SpecError
from shardscope.runlog.reducer import RunLog
from shardscope.runtime import launch
from shardscope.spec import Checkpoint, Job, LRSchedule
from shardscope.tuning.runs import run_to_end

if TYPE_CHECKING:
    import pandas as pd

EXPLODED = 4.0
"""Multiple of its minimum at which the smoothed loss ends the test, as in fastai's ``lr_find``. If the minimum is
negative, the loss must exceed it by three times its absolute value."""
FEWEST_STEPS = 10
_NOT_A_NUMBER = ("TrainingError", "NotFinite")
"""Types of the error event that a rank writes when its loss or gradients are not finite."""


@dataclass(frozen=True)
class LrRange:
    """Result of a range test, with one entry per step before the first loss that is not finite.

    Attributes:
        lr: Learning rates, rising.
        loss: Loss of each step, averaged over ranks.
        smooth: `loss` smoothed over neighbouring steps.
        rates: Learning rates that the curve suggests.
        exploded: Whether the loss exploded or became NaN before the highest rate was reached. If it did not,
            higher rates may work as well.
        run_id: Id of the run.
    """

    lr: tuple[float, ...]
    loss: tuple[float, ...]
    smooth: tuple[float, ...]
    rates: RateSuggestions
    exploded: bool
    run_id: str

    @property
    def suggested(self) -> float:
        """Suggested learning rate, at which the loss fell fastest (`RateSuggestions.steepest`)."""
        return self.rates.steepest

    @property
    def frame(self) -> pd.DataFrame:
        """Frame with one row per step; columns lr, loss, smooth."""
        import pandas as pd

        return pd.DataFrame({"lr": self.lr, "loss": self.loss, "smooth": self.smooth})

    def __repr__(self) -> str:
        return (
            f"<LrRange: suggested {self.suggested:.3g}, lowest loss at {self.rates.lowest:.3g}, {len(self.lr)} steps "
            f"from {self.lr[0]:.3g} to {self.lr[-1]:.3g}{', where the loss exploded' if self.exploded else ''}>"
        )


def lr_range_test(
    job: Job, *, low: float = 1e-6, high: float = 10.0, steps: int = 100, root: str | Path | None = None
) -> LrRange:
    """Train `job` while the learning rate rises exponentially from `low` to `high`, and suggest rates from the curve.

    The test ignores the job's own learning rate and schedule. It ends early when the loss explodes.

    Args:
        job: What to train; use the batch size, optimizer and compression of the planned training.
        low: Learning rate of the first step, above 0.
        high: Learning rate of the last step, above `low`.
        steps: Number of steps, at least 10.
        root: Folder of the runs; None uses the default folder.

    Raises:
        SpecError: Rates or steps are out of range, or the loss never fell.
        RunFailed: The run failed for a reason other than an exploding loss.
    """
    run = launch(
        range_job(job, low=low, high=high, steps=steps), root=root, made_by="learning-rate range test"
    )
    exploded = run_to_end(run, stop_when=lambda meter: _has_exploded(_losses(meter.log)[1]))
    error, lr, loss = run.error, *_losses(run.reduced())
    if not exploded and error is not None:
        if not any(event["type"] in _NOT_A_NUMBER for event in run.events("error")):
            raise error
        exploded = True
    return _read(run.id, lr, loss, exploded=exploded or _has_exploded(loss))


def range_job(job: Job, *, low: float, high: float, steps: int) -> Job:
    """Return the job of a range test; see `lr_range_test`.

    Raises:
        SpecError: Rates or steps are out of range.
    """
    if not 0 < low < high < float("inf"):
        raise SpecError(f"low={low!r} and high={high!r} must be learning rates with 0 < low < high")
    if steps < FEWEST_STEPS:
        raise SpecError(f"steps={steps!r} are too few for a range test; use at least {FEWEST_STEPS}")
    # a schedule reaches its final ratio one step after the last step, hence the exponent
    lr_schedule = LRSchedule("exponential", final_ratio=(high / low) ** (steps / (steps - 1)))
    return job.replace(
        optimizer=job.optimizer.replace(lr=low), lr_schedule=lr_schedule, steps=steps, eval_every=None,
        checkpoint=Checkpoint(), name=f"lr-range-{job.label}"[:80],
    )  # fmt: skip


def _losses(log: RunLog) -> tuple[list[float], list[float]]:
    """Return learning rates and losses of the steps so far, up to the first loss that is not finite."""
    taken = [*takewhile(lambda step: isfinite(step.loss), log.steps)]
    return [step.lr for step in taken], [step.loss for step in taken]


def _has_exploded(loss: list[float]) -> bool:
    if len(loss) < FEWEST_STEPS:
        return False
    smooth = smoothed_loss(loss)
    least = smooth.min()
    return bool(smooth[-1] - least > (EXPLODED - 1) * abs(least))


def _read(run_id: str, lr: list[float], loss: list[float], *, exploded: bool) -> LrRange:
    smooth = smoothed_loss(loss)
    return LrRange(
        tuple(lr), tuple(loss), tuple(smooth.tolist()), suggest_rates(lr, smooth), exploded, run_id
    )
