"""Whether compression paid off in a run: its step time and loss compared with those without compression.

Measured steps are compared with measured ones, and predicted steps with predicted ones: a busy machine slows a measured
step, but not a prediction. Of faster steps, the losses of two runs of the same job decide; without them, the shipped
results of other runs do, with their tolerances (see `loss_increase`).
"""

from __future__ import annotations

from collections.abc import Iterable
from enum import Enum
from math import isfinite, isnan, nan
from typing import NamedTuple

from shardscope.measure.compression.curve import ERROR, MARGIN, MeasuredStep, Worth
from shardscope.measure.compression.loss_increase import MEASURED_ON, increase_and_tolerance, loss_text
from shardscope.runtime import Run
from shardscope.spec import Job
from shardscope.spec.units import duration_text, faster_text

_MEASURED_MARGIN = 1.03
"""Smallest ratio of two measured step times that counts as a difference."""
_SAME_LOSS = 5e-4
"""Largest relative change of a loss that counts as unchanged."""
_ONE_RUN = 0.05
"""Largest relative increase of one run's loss that may be noise."""
_OPEN = frozenset({"compression", "link", "name", "record"})
"""Fields in which two jobs whose losses are compared may differ."""


class _Gained(Enum):
    """What faster steps are worth, given the loss; the value is the end of the sentence."""

    PAYS = ""
    UNKNOWN = "steps faster"
    TOO_HIGH = "steps faster, but its loss is too high"
    HIGH_ELSEWHERE = "steps faster, but its loss was too high in other runs"
    DIVERGED = "steps faster, but the run diverged"
    NOT_COMPLETED = "steps faster, but the run did not complete"

    def text(self, pays: str, makes: str) -> str:
        """Return the predicate, given its verbs: ``paid off`` or ``made steps faster``."""
        return pays if self is _Gained.PAYS else f"{makes} {self.value}"


class _Losses(NamedTuple):
    """Mean losses of a compressed run and of an uncompressed run of the same job, which ended at the same step."""

    own: float
    plain: float

    @property
    def change(self) -> float:
        return (self.own - self.plain) / abs(self.plain)


def paid_off_text(run: Run, worth: Worth, runs: Iterable[Run]) -> str:
    """Return sentences on whether compression paid off in a run, and its effect on the loss; empty before a step has
    finished.

    The measured step is compared with that of an uncompressed run of the same job on the same link, where differences
    below 3% do not count. Without such a run, the predicted steps are compared, as on the curve. Compression pays off
    only if the run completed and its loss is at most 5% higher than that of an uncompressed run of the same job. If
    there is none, its method must stay within its tolerance in the shipped results.

    Args:
        run: A finished compressed run.
        worth: Result of `ss.compression_speedup` for its job and cluster.
        runs: Runs among which uncompressed ones are looked up.
    """
    summary = run.stored_summary or run.summary()
    if summary.step_time_s is None:
        return ""
    own = MeasuredStep(run.job.compression, worth.link.bandwidth, summary.step_time_s, run.id)
    losses = _losses(run, runs)
    gained, plain = _gained(run, worth, losses), worth.measured_plain(own)
    told = _by_prediction(own, worth, gained) if plain is None else _by_measurement(own, plain, worth, gained)
    return " ".join(filter(None, [told, _loss_sentence(run, losses), _known_loss(run, worth, losses)]))


def _by_measurement(own: MeasuredStep, plain: MeasuredStep, worth: Worth, gained: _Gained) -> str:
    """Return the verdict on two measured steps, with the predicted gain."""
    gain, name = plain.step_s / own.step_s, own.compression.label
    told, within = "did not pay off", ""
    if 1 / _MEASURED_MARGIN < gain < _MEASURED_MARGIN:
        told, within = "made no difference", f"; differences below {_MEASURED_MARGIN - 1:.0%} do not count"
    elif gain > 1:
        told = gained.text("paid off", "made")
    predicted = worth.step_with(own.compression)
    also = "" if predicted is None else f"; predicted: {faster_text(worth.speedup(predicted))}"
    return (
        f"Compression {told}: a step took {duration_text(own.step_s)} with {name}, {faster_text(gain)} than the "
        f"{duration_text(plain.step_s)} without compression (both measured{within}{also})."
    )


def _by_prediction(own: MeasuredStep, worth: Worth, gained: _Gained) -> str:
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
        told = f"compression {gained.text('pays off', 'makes')}"
    return (
        f"By prediction, {told}: a step takes {duration_text(predicted.step_s)} with {name} instead of "
        f"{duration_text(worth.plain.step_s)}, {faster_text(gain)}{within}. The {later}"
    )


def _gained(run: Run, worth: Worth, losses: _Losses | None) -> _Gained:
    """Return what faster steps of a run are worth: its own loss decides if it can be compared, else shipped results."""
    loss = (run.stored_summary or run.summary()).loss_mean
    if loss is not None and not isfinite(loss):
        return _Gained.DIVERGED
    if run.state != "completed":
        return _Gained.NOT_COMPLETED
    if losses is not None:
        return _Gained.TOO_HIGH if losses.change > _ONE_RUN else _Gained.PAYS
    known, tolerance = increase_and_tolerance(run.job.compression, worth.optimizer)
    if isnan(known):
        return _Gained.UNKNOWN
    return _Gained.HIGH_ELSEWHERE if known > tolerance else _Gained.PAYS


def _losses(run: Run, runs: Iterable[Run]) -> _Losses | None:
    """Return the mean losses of a completed run and of the first uncompressed one of the same job; None without one."""
    own = run.stored_summary or run.summary()
    beside = (each.stored_summary for each in runs if _is_uncompressed(run.job, each))
    found = (
        _Losses(own.loss_mean or nan, plain.loss_mean or nan)
        for plain in beside
        if plain is not None and plain.last_step == own.last_step
    )
    return next((each for each in found if isfinite(each.change)), None) if run.state == "completed" else None


def _is_uncompressed(job: Job, other: Run) -> bool:
    """Return whether a run completed the same job without compression, on any link."""
    return (
        isinstance(other.job, Job)
        and other.state == "completed"
        and not other.job.compression.is_on
        and _compared(other.job) == _compared(job)
    )


def _compared(job: Job) -> object:
    return job.model_dump(mode="json", exclude={*_OPEN})


def _loss_sentence(run: Run, losses: _Losses | None) -> str:
    """Return a sentence on a run's loss relative to the uncompressed run, or on why the two are not compared."""
    if losses is None:
        return "" if run.state == "completed" else "Its loss is not compared."
    if abs(losses.change) < _SAME_LOSS:
        return f"Its mean loss is unchanged, {losses.own:.4g}."
    word = f"{abs(losses.change):.1%} {'higher' if losses.change > 0 else 'lower'}"
    return (
        f"Its mean loss ended at {losses.own:.4g} instead of {losses.plain:.4g}: {word}; in one run each, differences "
        f"up to {_ONE_RUN:.0%} may be noise."
    )


def _known_loss(run: Run, worth: Worth, losses: _Losses | None) -> str:
    """Return a sentence on the shipped results; empty if the run's own loss is known and these raise no doubt."""
    known, tolerance = increase_and_tolerance(run.job.compression, worth.optimizer)
    if losses is not None and not known > tolerance:
        return ""
    told = loss_text(run.job.compression, worth.optimizer, with_tolerance=True)
    if isnan(known):
        return f"The effect on the loss is not known: {told}."
    return f"In other runs ({MEASURED_ON}): {told}."
