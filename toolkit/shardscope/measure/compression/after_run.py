"""Whether compression paid off in a run: its step time and loss compared with those without compression."""

from __future__ import annotations

from collections.abc import Iterable

from shardscope.measure.compression.curve import ERROR, MARGIN, MeasuredStep, Worth
from shardscope.measure.compression.loss_increase import MEASURED_ON, loss_text
from shardscope.runtime import Run
from shardscope.spec.units import duration_text, faster_text

_MEASURED_MARGIN = 1.03
"""Smallest ratio of two measured step times that counts as a difference."""
_SAME_LOSS = 5e-4
"""Largest relative change of a loss that counts as unchanged."""


def paid_off_text(run: Run, worth: Worth, runs: Iterable[Run]) -> str:
    """Return sentences on whether compression paid off in a run, and what it cost; empty before a step has finished.

    The run is compared with a measured uncompressed run of the same job on the same link or, without one, with the
    predicted uncompressed step. Differences of less than 3% from a measured step, or less than the prediction error
    from a predicted one, count as neither a gain nor a loss.

    Args:
        run: A finished compressed run.
        worth: Result of `ss.compression_speedup` for its job and cluster.
        runs: Runs among which the uncompressed one is looked up, by the ids in `Worth.measured`.
    """
    summary = run.stored_summary or run.summary()
    if summary.step_time_s is None:
        return ""
    own = MeasuredStep(run.job.compression, worth.link.bandwidth, summary.step_time_s, run.id)
    plain, name = worth.measured_plain(own), run.job.compression.label
    without_s = worth.plain.step_s if plain is None else plain.step_s
    gain = without_s / own.step_s
    margin = MARGIN if plain is None else _MEASURED_MARGIN
    told, within = "Compression paid off" if gain > 1 else "Compression did not pay off", ""
    if 1 / margin < gain < margin and plain is None:
        told, within = "Too close to tell", f", which is below {ERROR}"
    elif 1 / margin < gain < margin:
        told, within = "Compression made no difference", f" (differences below {margin - 1:.0%} do not count)"
    without = f"{'predicted ' if plain is None else ''}{duration_text(without_s)} without compression"
    change = f"{faster_text(gain)} than the {without}{within}"
    first = f"{told}: a step took {duration_text(own.step_s)} with {name}, {change}."
    before = None if plain is None else next((each for each in runs if each.id == plain.run_id), None)
    return f"{first} {_price(run, before, worth)}"


def _price(run: Run, before: Run | None, worth: Worth) -> str:
    """Return a sentence on a run's loss: relative to an uncompressed run that ended at the same step, or as shipped."""
    if before is not None:
        own, plain = (each.stored_summary or each.summary() for each in (run, before))
        if own.loss_mean is not None and plain.loss_mean and own.last_step == plain.last_step:
            change = own.loss_mean / plain.loss_mean - 1
            if abs(change) < _SAME_LOSS:
                return f"Its mean loss is unchanged, {own.loss_mean:.4g}."
            word = f"{abs(change):.1%} {'higher' if change > 0 else 'lower'}"
            return f"Its mean loss ended at {own.loss_mean:.4g} instead of {plain.loss_mean:.4g}: {word}."
    known = loss_text(run.job.compression, worth.optimizer)
    if "not measured" in known:
        return f"The effect on the loss is not known: {known}."
    return f"Its price: {known} ({MEASURED_ON})."
