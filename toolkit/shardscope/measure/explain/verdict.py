"""Whether a change of a job helped: a run compared with the run before the change."""

from __future__ import annotations

from typing import NamedTuple

from shardscope.measure.explain import words
from shardscope.measure.explain.losses import losses
from shardscope.measure.explain.of_run import measured_step
from shardscope.methods.strategies.pipeline import with_split
from shardscope.runlog.steps import WARM_UP_STEPS, StepKinds
from shardscope.runtime import Run
from shardscope.runtime.launcher.preflight import preflight
from shardscope.runtime.record.launch_prediction import constants_of


class Verdict(NamedTuple):
    """Effect of a change of a job, in sentences.

    Attributes:
        finding: Sentence on the largest loss before the change: its share of the time now and before. If the loss
            cannot be compared, the sentence on the speed.
        more: Sentence on the speed, measured and predicted; empty if it is the finding.
    """

    finding: str
    more: str = ""


def verdict(run: Run, before: Run) -> Verdict | None:
    """Return the measured and predicted effect of a change; None until both runs have finished steps.

    Args:
        run: The run with the change; it may still be running.
        before: The run without it.
    """
    rate, rate_before = run.summary().samples_per_s, before.summary().samples_per_s
    if not rate or not rate_before:
        return None
    then, now = (
        preflight(
            with_split(each.job, each.reduced().split), each.cluster, launched=constants_of(run)
        ).prediction
        for each in (run, before)
    )
    predicted = None
    if then is not None and now is not None and then.step_time_s and now.step_time_s:
        predicted = then.samples_per_s / now.samples_per_s
    what, spreads = words.changed_text(run.job, before.job), (_middle_half(before), _middle_half(run))
    more_samples = run.job.batch.global_batch / before.job.batch.global_batch
    speed = words.speed_text(what, rate / rate_before, predicted, spreads, more_samples)
    speed += words.split_text(run.reduced().split, before.reduced().split)
    first = measured_step(before.tail().poll(), before.job, now)  # `events` would keep them in memory
    second = measured_step(run.tail().poll(), run.job, then)
    if first is None or second is None:
        return Verdict(speed)
    loss = words.loss_change_text(losses(first)[0], first, second)
    return Verdict(loss, speed) if loss else Verdict(speed)


def _middle_half(run: Run) -> tuple[float, float] | None:
    """Return the quartiles of the step times in seconds, without warm-up; None if a job has several kinds of steps."""
    times = run.metrics()["step_time_s"].iloc[WARM_UP_STEPS:]
    if StepKinds.of(run.job).period > 1 or times.empty:
        return None
    return float(times.quantile(0.25)), float(times.quantile(0.75))
