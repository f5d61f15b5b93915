"""Whether compression paid off in a run: its step time and loss compared with those without compression.

Measured steps are compared with measured ones, and predicted steps with predicted ones: a busy machine slows a measured
step, but not a prediction. The verdict is that of the curve (see `Worth`), with its margin and its tolerated loss.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from shardscope.measure.compression.curve import ERROR, MARGIN, MeasuredStep, Worth
from shardscope.measure.compression.loss_increase import (
    MEASURED_ON,
    increase_and_tolerance,
    is_within_tolerance,
    loss_text,
)
from shardscope.runtime import Run
from shardscope.spec.units import duration_text, faster_text

_MEASURED_MARGIN = 1.03
"""Smallest ratio of two measured step times that counts as a difference."""
_SAME_LOSS = 5e-4
"""Largest relative change of a loss that counts as unchanged."""
_ONE_RUN = 0.05
"""Largest increase of one run's loss that may be noise: the shipped means over seeds, not the run, decide up to it."""
_PAID, _FASTER = "Compression paid off", "Compression made steps faster"
_TOO_HIGH = f"{_FASTER}, but its loss is too high"


class _Losses(NamedTuple):
    """Mean losses of a compressed run and of the uncompressed run beside it, which ended at the same step."""

    own: float
    plain: float

    @property
    def change(self) -> float:
        return self.own / self.plain - 1


def paid_off_text(run: Run, worth: Worth, runs: Iterable[Run]) -> str:
    """Return sentences on whether compression paid off in a run, and its effect on the loss; empty before a step has
    finished.

    The measured step is compared with that of an uncompressed run of the same job on the same link, where differences
    below 3% do not count. Without such a run, the predicted steps are compared, as on the curve. Compression pays off
    only if the loss stays within the method's tolerance.

    Args:
        run: A finished compressed run.
        worth: Result of `ss.compression_speedup` for its job and cluster.
        runs: Runs among which the uncompressed one is looked up, by the ids in `Worth.measured`.
    """
    summary = run.stored_summary or run.summary()
    if summary.step_time_s is None:
        return ""
    own = MeasuredStep(run.job.compression, worth.link.bandwidth, summary.step_time_s, run.id)
    plain = worth.measured_plain(own)
    if plain is None:
        return f"{_by_prediction(own, worth)} {_known_loss(run, worth)}"
    before = next((each for each in runs if each.id == plain.run_id), None)
    losses = None if before is None else _losses(run, before)
    return f"{_by_measurement(own, plain, worth, losses)} {_loss_sentence(run, worth, losses)}"


def _by_measurement(own: MeasuredStep, plain: MeasuredStep, worth: Worth, losses: _Losses | None) -> str:
    """Return the verdict on two measured steps, with the predicted gain."""
    gain, name = plain.step_s / own.step_s, own.compression.label
    told, within = "Compression did not pay off", ""
    if 1 / _MEASURED_MARGIN < gain < _MEASURED_MARGIN:
        told, within = (
            "Compression made no difference",
            f"; differences below {_MEASURED_MARGIN - 1:.0%} do not count",
        )
    elif gain > 1:
        told = _gained(own, worth, losses)
    predicted = worth.step_with(own.compression)
    also = "" if predicted is None else f"; predicted: {faster_text(worth.speedup(predicted))}"
    return (
        f"{told}: a step took {duration_text(own.step_s)} with {name}, {faster_text(gain)} than the "
        f"{duration_text(plain.step_s)} without compression (both measured{within}{also})."
    )


def _by_prediction(own: MeasuredStep, worth: Worth) -> str:
    """Return the verdict on the predicted steps, and what is needed to compare measured ones."""
    name, predicted = own.compression.label, worth.step_with(own.compression)
    later = (
        f"step measured with {name}, {duration_text(own.step_s)}, can be compared once the job has also run without "
        "compression."
    )
    if predicted is None:
        return f"Whether compression paid off is not known: the {later}"
    gain, within = worth.speedup(predicted), ""
    told = "compression does not pay off"
    if 1 / MARGIN < gain < MARGIN:
        told, within = "too close to tell", f", which is below {ERROR}"
    elif gain > 1:
        told = {_PAID: "compression pays off", _FASTER: "compression makes steps faster"}.get(
            _gained(own, worth, None), "compression makes steps faster, but its loss is too high"
        )
    return (
        f"By prediction, {told}: a step takes {duration_text(predicted.step_s)} with {name} instead of "
        f"{duration_text(worth.plain.step_s)}, {faster_text(gain)}{within}. The {later}"
    )


def _gained(own: MeasuredStep, worth: Worth, losses: _Losses | None) -> str:
    """Return the verdict on a method with faster steps, which depends on its loss, in shipped results and here."""
    known, tolerance = increase_and_tolerance(own.compression, worth.optimizer)
    if known > tolerance or (losses is not None and losses.change > max(_ONE_RUN, tolerance / 100)):
        return _TOO_HIGH
    return _PAID if is_within_tolerance(own.compression, worth.optimizer) else _FASTER


def _losses(run: Run, before: Run) -> _Losses | None:
    """Return the mean losses of two runs; None if they did not end at the same step."""
    own, plain = (each.stored_summary or each.summary() for each in (run, before))
    if own.loss_mean is None or not plain.loss_mean or own.last_step != plain.last_step:
        return None
    return _Losses(own.loss_mean, plain.loss_mean)


def _loss_sentence(run: Run, worth: Worth, losses: _Losses | None) -> str:
    """Return a sentence on a run's loss: relative to the uncompressed run, and where known of other runs."""
    if losses is None:
        return _known_loss(run, worth)
    if abs(losses.change) < _SAME_LOSS:
        told = f"Its mean loss is unchanged, {losses.own:.4g}."
    else:
        word = f"{abs(losses.change):.1%} {'higher' if losses.change > 0 else 'lower'}"
        told = f"Its mean loss ended at {losses.own:.4g} instead of {losses.plain:.4g}: {word}."
    known, tolerance = increase_and_tolerance(run.job.compression, worth.optimizer)
    is_high = max(known, 100 * losses.change) > tolerance
    return f"{told} {_known_loss(run, worth)}" if is_high else told


def _known_loss(run: Run, worth: Worth) -> str:
    """Return a sentence on the loss with the run's method in the runs whose results are shipped."""
    known = loss_text(run.job.compression, worth.optimizer, with_tolerance=True)
    if "not measured" in known:
        return f"The effect on the loss is not known: {known}."
    return f"In runs of {MEASURED_ON}: {known}."
