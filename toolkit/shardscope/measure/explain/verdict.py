"""Whether a change of a job helped: a run compared with the run before the change."""

from __future__ import annotations

from shardscope.measure.explain import words
from shardscope.measure.explain.losses import losses
from shardscope.measure.explain.of_run import measured_step
from shardscope.runlog.steps import WARM_UP_STEPS, StepKinds
from shardscope.runtime import Run
from shardscope.runtime.preflight import preflight


def verdict(run: Run, before: Run) -> str:
    """Return how a change turned out in sentences, measured and predicted; empty until both runs have finished steps.

    Args:
        run: The run with the change; it may still be running.
        before: The run without it.
    """
    rate, rate_before = run.summary().samples_per_s, before.summary().samples_per_s
    if not rate or not rate_before:
        return ""
    then, now = preflight(run.job).prediction, preflight(before.job).prediction
    predicted = None
    if then is not None and now is not None and then.step_time_s and now.step_time_s:
        predicted = then.samples_per_s / now.samples_per_s
    what, spreads = words.changed_text(run.job, before.job), (_middle_half(before), _middle_half(run))
    text = words.verdict_text(what, rate / rate_before, predicted, spreads)
    first = measured_step(before.tail().poll(), before.job, now)  # `events` would keep them in memory
    second = measured_step(run.tail().poll(), run.job, then)
    if first is None or second is None:
        return text
    return f"{text} {words.loss_change_text(losses(first)[0], first, second)}".strip()


def _middle_half(run: Run) -> tuple[float, float] | None:
    """Return the quartiles of the step times in seconds, without warm-up; None if the job has unlike steps."""
    times = run.metrics()["step_time_s"].iloc[WARM_UP_STEPS:]
    if StepKinds.of(run.job).period > 1 or times.empty:
        return None
    return float(times.quantile(0.25)), float(times.quantile(0.75))
